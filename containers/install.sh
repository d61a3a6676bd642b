#!/bin/sh
# A stage of the image build: `install.sh packages | torch cpu|cuda | project`. Runs as root inside the build.
#
# Each stage leaves only what a node needs: no cache, no tests, no headers, and the same bytes from
# the same inputs, so that a rebuilt layer has the digest it had before.
set -eu
VENV=/opt/venv
LOCK=/build/requirements.lock
export PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 \
    PIP_ROOT_USER_ACTION=ignore PIP_NO_WARN_SCRIPT_LOCATION=1 PIP_PROGRESS_BAR=off
# Wheels given to the build replace the package index altogether.
if [ -n "$(ls /mnt/wheels/wheels 2>/dev/null)" ]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/mnt/wheels/wheels
fi

install() { "$VENV/bin/python" -m pip install --quiet --constraint "$LOCK" "$@"; }

site_packages() { "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

prune() { # what no node runs
    packages=$(site_packages)
    # Tests of other projects; those of torch are 80 MB.
    find "$packages" -type d \( -name tests -o -name test \) -prune \
        -path '*/site-packages/*' ! -path '*/torch/testing/*' ! -path '*/sympy/testing/*' \
        ! -path '*/numpy/testing/*' ! -path '*/unittest/*' -exec rm -rf {} +
    # Headers and static libraries: there is no compiler here.
    rm -rf "$packages"/torch/include "$packages"/torch/share "$packages"/pyarrow/include \
        "$packages"/numpy/_core/include "$packages"/ray/jars "$packages"/ray/cpp
    if [ -d "$packages/torch/bin" ]; then
        find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete
    fi
    find "$packages" -name '*.a' -delete
}

# A process without the right to write bytecode would compile anew at each start. Some packages carry
# templates that are no Python yet: not an error.
compile() {
    "$VENV/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$@" >/dev/null || true
}

finish() { # bytecode of what is new in a folder, and nothing that tells when this ran
    # All at once: compileall starts its processes anew for each call.
    find "$1" -mindepth 1 -maxdepth 1 -newermt 2000-01-02 >/tmp/new
    # Names of packages have no spaces.
    # shellcheck disable=SC2046
    [ ! -s /tmp/new ] || compile $(cat /tmp/new)
    find /opt -newermt 2000-01-02 -exec touch --no-dereference --date=2000-01-01 {} +
    find /tmp /var/tmp -mindepth 1 -delete
}

case $1 in
    packages)
        # A base image with torch brings CUDA, EFA and their libraries: its packages count.
        if python3 -c 'import torch' 2>/dev/null; then shared=--system-site-packages; else shared=''; fi
        python3 -m venv $shared "$VENV"
        # Slim images come without the bytecode of Python itself.
        library=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
        if [ ! -d "$library/__pycache__" ]; then
            compile -x '/(test|tests|idlelib|lib2to3|turtledemo|site-packages|dist-packages)/' "$library"
            find "$library" -name __pycache__ -exec touch --date=2000-01-01 {} +
            find "$library" -name '*.pyc' -exec touch --date=2000-01-01 {} +
        fi
        pip_pin=$(sed -n 's/^pip==/pip==/p' "$LOCK")
        install --upgrade "$pip_pin"
        sed '/^torch==/d' /build/requirements.txt >/tmp/requirements.txt
        install --requirement /tmp/requirements.txt
        # Importable from everywhere, also by the workers that Ray starts.
        echo /opt/train >"$(site_packages)/train.pth"
        prune
        finish "$(site_packages)"
        ;;
    torch)
        pin=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' /build/requirements.txt)
        if [ -n "${PIP_NO_INDEX:-}" ] || "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
            install "$pin"
        elif [ -n "$TORCH_INDEX" ]; then
            install --index-url "$TORCH_INDEX" "$pin"
        elif [ "$2" = cuda ]; then
            install "$pin"
        else
            echo "error: no index for torch's CPU build: give --build-arg TORCH_CPU_INDEX=ADDRESS," \
                "which PyTorch's page 'Start Locally' shows for the compute platform CPU" >&2
            exit 1
        fi
        prune
        finish "$(site_packages)"
        ;;
    project)
        "$VENV/bin/python" -m pip check
        finish /opt/train
        # Fails here and not on a host that somebody pays for.
        cd / && "$VENV/bin/python" -c 'import containers.node, training.launch, training.driver, training.ddp, ray.train.torch, pyarrow.fs, s3fs'
        find /tmp /var/tmp -mindepth 1 -delete
        ;;
esac
