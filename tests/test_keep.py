"""What [disk] keep leaves: files that can be read without tiermem."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tiermem
from tiermem.trainer import AdamW


def test_kept_pages_are_read_with_numpy_by_their_index(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    config = {
        "device": {"kind": "cpu"},
        "host": {"budget": "120KiB"},
        "disk": {"paths": [str(tmp_path)], "keep": True},
    }
    model = tiermem.TieredModule(net, config)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        name: state["exp_avg"]
        for (name, _), state in zip(
            model.named_parameters(), optimizer.state_dict()["state"].values(), strict=True
        )
    }
    model.close()

    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("tiermem-kept-")
    data = (folder / "pages.bin").read_bytes()
    found: dict[tuple[str, str], np.ndarray] = {}
    for page in json.loads((folder / "pages.json").read_text())["pages"]:
        if page["blank"]:
            continue
        values = np.frombuffer(data, page["dtype"], page["nbytes"] // 4, page["offset"])
        for tensor in page["tensors"]:
            first, numel = tensor["first"], int(np.prod(tensor["size"]))
            if first >= 0 and first + numel <= len(values):
                found[page["kind"], tensor["name"]] = values[first : first + numel].reshape(tensor["size"])
    for name, parameter in net.named_parameters():
        assert np.array_equal(found["parameter", name], parameter.detach().numpy())
        assert np.array_equal(found["exp_avg", name], moments[name].numpy())
