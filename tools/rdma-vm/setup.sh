#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make ready what run.py needs: Debian packages, and a kernel with an RDMA device beside its modules.
#   tools/rdma-vm/setup.sh          safe to repeat; the second time it does next to nothing
# Needs Debian 12 or later on amd64, and root where packages are missing. The kernel is unpacked
# into the cache, not installed. RDMA_VM_CACHE names the cache (/var/cache/fastps-rdma-vm).
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${RDMA_VM_CACHE:-/var/cache/fastps-rdma-vm}
packages=(busybox-static cpio ibverbs-providers ibverbs-utils iproute2 kmod libibverbs-dev perftest
    python3-pyverbs qemu-system-x86 xz-utils)
# rxe computes a CRC of every packet; it does not load what it needs for that by itself.
modules=(virtio_pci virtio_console 9pnet_virtio 9p overlay dummy virtio_net crc32_generic rdma_rxe
    ib_uverbs)

fail() { echo "setup.sh: $*" >&2; exit 1; }

apt() {
    ((EUID == 0)) || fail "run this as root once: apt-get $* is needed"
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o APT::Sandbox::User=root "$@" >"$work/apt" 2>&1 ||
        { tail -n 20 "$work/apt" >&2; fail "apt-get $1 failed"; }
}

install_packages() {
    local missing=() name
    for name in "${packages[@]}"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$name" 2>/dev/null | grep -qx installed ||
            missing+=("$name")
    done
    ((${#missing[@]})) || return 0
    echo "installing ${missing[*]}"
    apt update
    apt install -y --no-install-recommends "${missing[@]}"
}

# The package that linux-image-amd64 stands for; the small image for clouds has no RDMA.
image_package() { apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: //p' | head -n 1; }

fetch_kernel() {
    local package
    package=$(image_package)
    if [ -z "$package" ]; then
        apt update
        package=$(image_package)
    fi
    [ -n "$package" ] || fail "no package linux-image-amd64"
    echo "unpacking $package"
    (cd "$work" && { apt download "$package" || { apt update && apt download "$package"; }; })
    dpkg-deb -x "$work"/linux-image-*.deb "$work/tree"
}

# Uncompressed it boots seconds sooner, for nothing is accelerated.
unpack_kernel() {
    local image=$1 start
    start=$(LC_ALL=C grep -aobPm 1 '\xFD7zXZ\x00' "$image" | head -n 1 | cut -d : -f 1) || start=
    [ -z "$start" ] ||
        tail -c "+$((start + 1))" "$image" | xz -dc --single-stream >"$work/kernel" 2>/dev/null || true
    [ "$(head -c 4 "$work/kernel" 2>/dev/null)" = $'\x7fELF' ] || cp "$image" "$work/kernel"
}

copy_modules() {
    local version=$1 name path number=100
    depmod -b "$work/tree" "$version"
    for name in "${modules[@]}"; do
        modprobe -d "$work/tree" -S "$version" --show-depends "$name" || fail "no module $name"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$work/list"
    while read -r path; do
        number=$((number + 1))
        name=$(basename "$path" .xz)
        case $path in
            *.xz) xz -dc "$path" >"$work/root/modules/$number-$name" ;;
            *) cp "$path" "$work/root/modules/$number-$name" ;;
        esac
    done <"$work/list"
}

build_guest() {
    local image version
    fetch_kernel
    image=$(echo "$work"/tree/boot/vmlinuz-*)
    version=${image##*/vmlinuz-}
    unpack_kernel "$image"
    mkdir -p "$work"/root/{bin,dev,layer,lower,modules,proc,sys,system}
    copy_modules "$version"
    cp /bin/busybox "$work/root/bin/"
    install -m 755 "$here/init" "$work/root/init"
    (cd "$work/root" && find . | cpio -o -H newc --quiet) | gzip -1 >"$work/initramfs"
    mkdir -p "$cache"
    mv "$work/kernel" "$work/initramfs" "$cache/"
    echo "$stamp" >"$cache/stamp"
}

[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || fail "needs Debian on amd64"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stamp=$(cat "$here/setup.sh" "$here/init" | sha256sum | cut -c 1-16)
install_packages
[ "$(cat "$cache/stamp" 2>/dev/null)" = "$stamp" ] || build_guest
