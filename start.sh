#!/usr/bin/env bash
# Serves: ./start.sh [arguments of `appliance serve`]. Makes .venv beside this file first, where it is missing or out of
# date; a repeat run takes no pip. test.sh sources this file for make_environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
venv=$root/.venv
needed_kb=$((4 * 1024 * 1024))

die() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-1}"
}

find_python() {
    local name suitable=
    for name in python3.11 python3.12 python3.13 python3; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
        suitable=$name
        if "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    [[ -z $suitable ]] || die "$suitable has no venv module: install it (on Debian and Ubuntu: apt-get install python3-venv) and run this again" 4
    die "no Python 3.11 or newer was found as python3.11, python3.12, python3.13 or python3: install one and run this again" 4
}

hash_of_inputs() {
    cksum "$root/pyproject.toml" "$root/constraints.txt" "$root/start.sh"
}

has_nvidia_driver() {
    [[ -e /proc/driver/nvidia ]] || command -v nvidia-smi >/dev/null
}

pip_install() {
    local output=(--quiet --progress-bar off)
    [[ ! -t 2 ]] || output=(--progress-bar on)
    "$venv/bin/python" -m pip install "${output[@]}" --disable-pip-version-check --log "$venv/install.log" \
        --constraint "$root/constraints.txt" "$@" </dev/null
}

# A sentence for what pip ended with, from its log.
explain_failure() {
    local log=$venv/install.log
    if grep -q 'No space left on device' "$log"; then
        die "the disk of $root is full: free about 4 GB and run this again" 5
    elif grep -Eq 'from versions: none|Failed to establish a new connection|NameResolutionError|timed out|Connection refused|Network is unreachable|ProxyError' "$log"; then
        die "the package index could not be reached: check the network (or pip's index and proxy settings) and run this again" 6
    fi
    die "pip could not install what the appliance needs: its last lines are above, the whole log is $log" 7
}

make_venv() {
    local python free_kb
    python=$(find_python)
    free_kb=$(df -Pk "$root" | awk 'NR == 2 { print $4 }')
    ((free_kb >= needed_kb)) || die "only $((free_kb / 1024)) MB are free on the disk of $root: the installation needs about 4 GB" 5
    if ! rm -rf "$venv" || ! "$python" -m venv "$venv"; then
        die "$venv could not be made: check that $root can be written to" 4
    fi
    printf '%s' "$root" >"$venv/.root"
}

# make_environment EXTRA: .venv holds the appliance and, where EXTRA is "dev", what the tests need.
make_environment() {
    local stamp=$venv/.installed${1:+-$1} target=$root${1:+[$1]}
    exec 9<"$root/pyproject.toml"
    ! command -v flock >/dev/null || flock 9 # a second run waits for the first

    # An install that was killed may have left half a package, which pip would take for a whole one; scripts hold paths.
    if [[ -e $venv/.installing || $(cat "$venv/.root" 2>/dev/null) != "$root" ]] ||
        ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        [[ ! -e $venv ]] || printf '%s\n' "Rebuilding $venv: it is incomplete or was made elsewhere." >&2
        make_venv
    fi

    if [[ $(cat "$stamp" 2>/dev/null) != "$(hash_of_inputs)" ]]; then
        printf '%s\n' "Installing into $venv: this takes minutes the first time." >&2
        export PIP_USER=0 PIP_ROOT_USER_ACTION=ignore
        touch "$venv/.installing"
        if [[ $(uname -s) == Linux ]] && ! has_nvidia_driver; then
            # The CPU build is a fraction of the default one's size; the default one runs on a CPU too.
            pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu --timeout 5 --retries 0 torch 2>/dev/null ||
                printf '%s\n' "PyTorch's CPU index did not answer: taking torch from the default index, a larger download." >&2
        fi
        rm -f "$venv/install.log"
        if ! pip_install --editable "$target"; then
            grep -qs 'Installing collected packages' "$venv/install.log" || rm -f "$venv/.installing"
            explain_failure
        fi
        rm -f "$venv/install.log"
        hash_of_inputs | tee "$venv/.installed" >"$stamp"
        rm -f "$venv/.installing"
    fi
    exec 9<&-
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    make_environment ""
    exec "$venv/bin/appliance" serve "$@"
fi
