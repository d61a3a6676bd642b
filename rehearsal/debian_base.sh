#!/bin/sh
# A base image for containers/Dockerfile where no image registry can be reached: Debian 12 with
# Python 3.11, from Debian's own packages.
#
#   debian_base.sh DOCKER TAG FOLDER
#
# DOCKER is the client's command, FOLDER an empty one for the files. Needs root and debootstrap.
set -eu
docker=$1 tag=$2 root=$3/rootfs
# In a mount namespace of its own: what it mounts is gone with it, however it ends.
unshare --mount --propagation private debootstrap --variant=minbase \
    --include=ca-certificates,gcc,git,libc6-dev,procps,python-is-python3,python3-dev,python3-distutils,python3.11,python3.11-venv,tini \
    bookworm "$root" >"$3/log" 2>&1 || { tail -n 5 "$3/log" >&2; exit 1; }
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
    "$root"/usr/share/doc "$root"/usr/share/man "$root"/usr/share/info \
    "$root"/usr/share/locale "$root"/usr/share/lintian
find "$root/usr" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$root" --numeric-owner --sort=name --mtime=@946684800 -c . |
    "$docker" import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        --change 'CMD ["python3"]' - "$tag" >/dev/null
rm -rf "$root"
