"""The planner: what a training run would take, before there is a machine for it; and what a live one takes.

It runs the code that a real run uses (units, pages, smallest budgets, plans) on parameters without memory, and plays
the plans on paper against the rates of links and arithmetic.
"""

from tiermem.planner.advice import Change, best, changes, try_changes
from tiermem.planner.explanation import Explanation, Laps, explain
from tiermem.planner.forecast import Forecast, Hardware, forecast
from tiermem.planner.model import Decoder, Model, from_config, from_object, from_sizes
from tiermem.planner.process import process_nbytes
from tiermem.planner.shape import Training

__all__ = [
    "Change",
    "Decoder",
    "Explanation",
    "Forecast",
    "Hardware",
    "Laps",
    "Model",
    "Training",
    "best",
    "changes",
    "explain",
    "forecast",
    "from_config",
    "from_object",
    "from_sizes",
    "process_nbytes",
    "try_changes",
]
