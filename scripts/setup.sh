#!/usr/bin/env bash
# Usage: scripts/setup.sh demo|test|arm
#
# Brings .venv to what the verb needs: system packages, Python packages, the built extension. What
# is up to date already is left alone. Everything is said on stderr; stdout belongs to the verb.
# PYTHON names the interpreter (python3); DOS_NO_APT=1 leaves the system's packages alone.
set -euo pipefail
cd "$(dirname "$0")/.."

verb=${1:?usage: scripts/setup.sh demo|test|arm}
python=${PYTHON:-python3}
cxx=${CXX:-g++}
py=.venv/bin/python
log=.venv/setup.log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
export DS_BUILD_OPS=0 # DeepSpeed's own kernels are not wanted

wanted=(python3-venv python3-dev g++ liburing-dev fio)
if [ "$verb" = arm ]; then
    verb=test # with these in addition
    wanted+=(g++-aarch64-linux-gnu qemu-user-static)
fi

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# stage TEXT COMMAND...: one line; the command's output is shown only if it fails.
stage() {
    local text=$1 start=$SECONDS
    shift
    printf 'setup: %s ...' "$text" >&2
    if "$@" >"$log" 2>&1; then
        printf ' %d s\n' $((SECONDS - start)) >&2
    else
        printf ' failed:\n' >&2
        tail -n 40 "$log" >&2
        exit 1
    fi
}

pip_install() { "$py" -m pip install --constraint constraints.txt "$@"; }
digest() { sha256sum | cut -d ' ' -f 1; }

# A stamp says for which inputs a stage has succeeded. It goes before the stage starts and comes
# back when it ends, so that a stage which was interrupted is done again.
fresh() { [ "$(cat ".venv/.stamp.$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >".venv/.stamp.$1"; }
unstamp() { rm -f "${@/#/.venv/.stamp.}"; }

# --- the system -------------------------------------------------------------------------------

present() { # is what the Debian package brings there, whoever installed it?
    case $1 in
        python3-venv) "$python" -c 'import ensurepip, venv' ;;
        python3-dev)
            test -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ;;
        g++) command -v "${cxx%% *}" ;; # CXX may be "ccache g++"
        liburing-dev) test -f /usr/include/liburing.h ;;
        fio) command -v fio ;;
        g++-aarch64-linux-gnu) command -v aarch64-linux-gnu-g++ ;;
        qemu-user-static) command -v qemu-aarch64-static || command -v qemu-aarch64 ;;
    esac >/dev/null 2>&1
}

without() { # what happens without it
    case $1 in
        python3-venv) echo "no environment can be made" ;;
        python3-dev | g++) echo "no native kernels; numba's are used" ;;
        liburing-dev) echo "checkpoints are written by threads instead of io_uring" ;;
        fio) echo "the disk benchmarks are off" ;;
        g++-aarch64-linux-gnu | qemu-user-static) echo "the NEON kernels cannot be tested" ;;
    esac
}

apt_install() {
    local root=()
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 180 apt-get -qq
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=120)
    "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "$@"
}

may_apt() {
    [ -z "${DOS_NO_APT:-}" ] && command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null
}

missing_packages() {
    local package
    for package in "${wanted[@]}"; do
        present "$package" || echo "$package"
    done
}

system_packages() {
    local package start=$SECONDS
    mapfile -t missing < <(missing_packages)
    # Asked once: a mirror that was out of reach is not waited for at every verb.
    if [ ${#missing[@]} -gt 0 ] && ! fresh apt "${missing[*]}" && may_apt; then
        say "apt-get install ${missing[*]} ..."
        stamp apt "${missing[*]}"
        if apt_install "${missing[@]}" >"$log" 2>&1; then
            unstamp apt
            say "installed in $((SECONDS - start)) s"
        else
            say "apt-get failed: $(tail -n 1 "$log")"
        fi
        mapfile -t missing < <(missing_packages)
    fi
    for package in "${missing[@]}"; do
        say "$package is missing: $(without "$package"). To add it: apt-get install $package"
    done
}

# --- the environment --------------------------------------------------------------------------

make_environment() {
    # The path is in the key because an environment that was copied along with the tree still
    # points to the old place.
    local key
    key=$({ pwd -P; "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; } | digest)
    if ! fresh environment "$key" || ! [ -x "$py" ]; then
        present python3-venv || die "stopped: \`$python -m venv\` needs python3-venv"
        unstamp environment demo test build
        stage "making .venv with $("$python" --version)" clean_environment
        stamp environment "$key"
    fi
}

clean_environment() {
    rm -rf .venv/bin .venv/lib .venv/lib64 .venv/include .venv/share .venv/pyvenv.cfg
    "$python" -m venv .venv
}

install_packages() {
    local key extras=$verb
    key=$({ cat pyproject.toml constraints.txt scripts/setup.sh; echo "$native"; } | digest)
    # What the tests need holds what the demo needs.
    if fresh test "$key" || fresh "$verb" "$key"; then return; fi
    [ "$native" = yes ] || extras+=,numba
    unstamp demo test build
    # DeepSpeed imports torch while it is built, so torch and the build tools come first and the
    # rest is built without isolation: an isolated build would not see the pins.
    stage "installing torch and the build tools" \
        pip_install setuptools wheel pybind11 ninja numpy torch
    rm -f kernels/*.so
    stage "installing what make $verb needs, building the kernels" \
        pip_install --verbose --no-build-isolation --editable ".[$extras]"
    check_kernels
    stamp build "$(build_key)"
    stamp "$verb" "$key"
}

build_key() { # what the extension is made from, and whether it is there
    {
        find kernels -type f ! -name '*.py*' ! -name '*.so' -print0 | sort -z | xargs -0 -r cat
        cat setup.py pyproject.toml
        echo "$native"
        if present liburing-dev; then echo liburing; fi
        $cxx --version || true
        ls kernels/*.so || true
    } 2>/dev/null | digest
}

build_kernels() {
    if fresh build "$(build_key)" && { kernels_built || [ "$verb" = demo ]; }; then return; fi
    unstamp build
    rm -f kernels/*.so
    stage "building the kernels" \
        pip_install --verbose --no-deps --no-build-isolation --editable .
    check_kernels
    stamp build "$(build_key)"
}

kernels_built() { [ "$native" = no ] || ls kernels/_native*.so >/dev/null 2>&1; }

check_kernels() { # a compiler that refuses them does not fail the install, so ask
    if kernels_built; then return; fi
    grep -A 2 -E ' error:|WITHOUT' "$log" | head -n 20 >&2 || true
    [ "$verb" = demo ] || die "stopped: $cxx does not compile the kernels; all is in $log"
    stage "$cxx does not compile the kernels, installing numba for its own" pip_install numba
}

"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null ||
    die "stopped: $python is not Python 3.10 to 3.13; name one: PYTHON=python3.12 make $verb"
mkdir -p .venv
# Two verbs at once: the second waits, then finds the work done.
if command -v flock >/dev/null; then
    exec 9<.
    flock -n 9 || { say "waiting for another set-up to end"; flock 9; }
fi
system_packages
native=no
if present g++ && present python3-dev; then native=yes; fi
make_environment
install_packages
build_kernels
