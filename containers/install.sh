#!/bin/sh
# A stage of the image build: `install.sh packages | efa VERSION SHA256 | torch cpu|cuda | project`.
# Runs as root inside the build.
#
# What it reads is mounted, so that it is in no layer; what a stage changes gets one date.
#
# Each stage leaves only what a node needs: no cache, no tests, no headers, and from the same inputs
# the same files with the same dates. (The builder itself dates /etc anew, for what it mounts there.)
set -eu
export PYTHONHASHSEED=0 # or sets would have another order in each run's bytecode
touch /tmp/began
VENV=/opt/venv
SOURCE=/mnt/build
LOCK=$SOURCE/requirements.lock
export PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 \
    PIP_ROOT_USER_ACTION=ignore PIP_NO_WARN_SCRIPT_LOCATION=1 PIP_PROGRESS_BAR=off
# Wheels given to the build replace the package index altogether.
if [ -n "$(ls /mnt/wheels/wheels 2>/dev/null)" ]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/mnt/wheels/wheels
fi

install() {
    # Without the hashes: pip would insist on one for torch too, whose build depends on the index.
    sed '/--hash=/d; s/ \\$//' "$LOCK" >/tmp/constraints.txt
    "$VENV/bin/python" -m pip install --quiet --constraint /tmp/constraints.txt "$@"
}

site_packages() { "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

prune() { # what no node runs
    packages=$(site_packages)
    # Tests of other projects; those of torch are 80 MB.
    find "$packages" -type d \( -name tests -o -name test \) -prune \
        -path '*/site-packages/*' ! -path '*/torch/testing/*' ! -path '*/sympy/testing/*' \
        ! -path '*/numpy/testing/*' ! -path '*/unittest/*' -exec rm -rf {} +
    # Headers and static libraries: Triton, which compiles on a CUDA worker, brings its own.
    rm -rf "$packages"/torch/include "$packages"/torch/share "$packages"/pyarrow/include \
        "$packages"/numpy/_core/include "$packages"/ray/jars "$packages"/ray/cpp
    if [ -d "$packages/torch/bin" ]; then
        find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete
    fi
    # Arrow's server and TensorBoard's: nodes only write files.
    rm -rf "$packages"/pyarrow/lib*flight* "$packages"/pyarrow/_flight* \
        "$packages"/tensorboard_data_server/bin
    # Beside static libraries, what a debugger of the dashboard's pages or Cython would read.
    find "$packages" \( -name '*.a' -o -name '*.css.map' -o -name '*.js.map' -o -name '*.pyx' \) -delete
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
    find /tmp /var/tmp -mindepth 1 ! -path /tmp/began -delete
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /mnt -o -path /var/cache \
        -o -path /etc/hosts -o -path /etc/hostname -o -path /etc/resolv.conf \) -prune \
        -o -cnewer /tmp/began -exec touch --no-dereference --date=2000-01-01 {} +
    rm -f /tmp/began
    touch --date=2000-01-01 /tmp
}

fail() { # MESSAGE
    echo "error: $1" >&2
    exit 1
}

has_plugin() { # NCCL loads libnccl-net.so by that name, and otherwise uses TCP without an error.
    for plugin in /opt/amazon/*/lib*/libnccl-net*.so /opt/amazon/*/lib*/*/libnccl-net*.so; do
        [ ! -e "$plugin" ] || return 0
    done
    return 1
}

no_torch() { # FROM
    fail "$pins cannot be installed from $1; to give the head another index: make images TORCH_INDEX=ADDRESS"
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
        fi
        # torch wants setuptools; here already, or its layer would have to hide the one of venv.
        install --upgrade pip setuptools
        # peft and accelerate bring torch along, from the default index: they wait for the next stage.
        sed '/^torch==/d; /^peft==/d; /^accelerate==/d' "$SOURCE/requirements/training.txt" >/tmp/requirements.txt
        install --requirement /tmp/requirements.txt
        # Importable from everywhere, also by the workers that Ray starts.
        echo /opt/train >"$(site_packages)/train.pth"
        prune
        finish "$(site_packages)"
        ;;
    efa)
        PATH=$PATH:/opt/amazon/efa/bin
        if command -v fi_info >/dev/null && { has_plugin || ldconfig -p | grep -q 'libnccl-net\.so'; }; then
            echo "EFA and NCCL's plug-in are the base image's own"
            exit 0
        fi
        [ -n "$2" ] || exit 0
        without="or build without EFA: make images ARGS='--tag NAME --build-arg EFA_INSTALLER='"
        command -v apt-get >/dev/null || command -v dnf >/dev/null ||
            fail "AWS's installer for EFA needs apt-get or dnf, which the base image lacks: take one of Debian, Ubuntu or Amazon Linux, $without"
        address=https://efa-installer.amazonaws.com/aws-efa-installer-$2.tar.gz
        cd /tmp
        python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' \
            "$address" efa.tar.gz || fail "$address cannot be fetched: try again, $without"
        echo "$3  efa.tar.gz" | sha256sum --check --quiet ||
            fail "$address has another SHA-256 than EFA_SHA256: do not use it, $without"
        tar -xzf efa.tar.gz
        ! command -v apt-get >/dev/null || apt-get update -q
        # AWS's arguments for containers: the host has the kernel module and sets the limits, and a
        # build sees no device. (EC2 User Guide, "Install the EFA software in a container")
        (cd aws-efa-installer && DEBIAN_FRONTEND=noninteractive ./efa_installer.sh -y --skip-kmod \
            --skip-limit-conf --no-verify)
        has_plugin ||
            fail "EFA installer $2 has no plugin for NCCL on this system: take a newer one or another base image, $without"
        folder=$(dirname "$plugin")
        [ -e "$folder/libnccl-net.so" ] || ln -s "$(basename "$plugin")" "$folder/libnccl-net.so"
        echo "$folder" >/etc/ld.so.conf.d/000_nccl_plugin.conf
        ldconfig
        /opt/amazon/efa/bin/fi_info --version
        # No node runs MPI.
        rm -rf /opt/amazon/openmpi* /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
            /var/cache/debconf/*-old /var/cache/ldconfig /var/cache/dnf
        finish /opt/amazon
        ;;
    torch)
        # torch and torchvision, whose builds belong together.
        pins=$(sed -n 's/^\(torch[a-z]*==[^ ]*\).*/\1/p' "$SOURCE"/requirements/*.txt | xargs)
        if "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
            pins='' # a base image's own
        # Only these two: an index of PyTorch has copies of their dependencies, in other versions.
        elif [ -n "${PIP_NO_INDEX:-}" ]; then
            :
        elif [ -n "$TORCH_INDEX" ]; then
            # shellcheck disable=SC2086
            install --no-deps --index-url "$TORCH_INDEX" $pins || no_torch "$TORCH_INDEX"
        elif [ "$2" = cpu ]; then
            # uv knows PyTorch's own index of CPU builds.
            # shellcheck disable=SC2086
            "$VENV/bin/python" -m uv pip install --quiet --python "$VENV/bin/python" \
                --cache-dir "$PIP_CACHE_DIR/uv" --link-mode copy --no-deps --torch-backend cpu $pins ||
                no_torch "PyTorch's index of CPU builds"
        fi
        # What they depend on, and peft; they themselves where the default index has their builds.
        # shellcheck disable=SC2086
        install --requirement "$SOURCE/requirements/training.txt" $pins
        [ -n "$pins" ] || "$VENV/bin/python" -c 'import torchvision' ||
            echo "warning: the base image has no torchvision that fits torch: programs that import it will fail, and where a wrong one is installed, so will models of transformers and timm" >&2
        prune
        finish "$(site_packages)"
        ;;
    project)
        "$VENV/bin/python" -m pip check
        mkdir -p /opt/train
        cp -R "$SOURCE/contract" "$SOURCE/store" "$SOURCE/training" "$SOURCE/containers" /opt/train/
        # What only builds the image.
        rm -f /opt/train/containers/Dockerfile /opt/train/containers/install.sh \
            /opt/train/containers/requirements*.txt
        # A folder of the host is mounted here; without one, it ends with the container.
        mkdir -p /var/cache/train
        chown 1000:1000 /var/cache/train
        touch --date=2000-01-01 /var/cache/train
        # Fails here and not on a host that costs money.
        modules='containers.node, training.launch, training.runtime.driver, training.ddp.train'
        cd / && "$VENV/bin/python" -c "import $modules, ray.train.torch, pyarrow.fs, s3fs"
        finish /opt/train
        ;;
esac
