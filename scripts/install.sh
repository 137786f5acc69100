# Sourced by the scripts beside it: installs system packages, or says the one command that does.
install_packages() {
  [ $# -gt 0 ] || return 0
  local install="apt-get update && apt-get install -y --no-install-recommends $*"
  if [ "$(id -u)" = 0 ]; then
    echo "tiermem: installing $*"
    DEBIAN_FRONTEND=noninteractive bash -c "$install -qq" >/dev/null
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    sudo DEBIAN_FRONTEND=noninteractive bash -c "$install -qq" >/dev/null
  else
    echo "tiermem: missing $*, and this user may not install them. Run once, then try again:" >&2
    echo "  sudo sh -c '$install'" >&2
    return 1
  fi
}
