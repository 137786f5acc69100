#!/usr/bin/env bash
# Has a Chromium for the tests of the trace viewer (Debian's), with a font: only `make test` needs it.
set -euo pipefail
. "$(dirname "$0")/install.sh"

missing=()
command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing+=(chromium)
[ -n "$(find /usr/share/fonts -name '*.ttf' -print -quit 2>/dev/null)" ] || missing+=(fonts-dejavu-core)
install_packages ${missing[@]+"${missing[@]}"}
