#!/bin/sh
# make_hipcc.sh DIR: install a newer hipcc than Debian 12's: a minimal Debian unstable in DIR, which must lie outside the
# repository, and a command DIR/hipcc that compiles files of this system with it. Needs root, debootstrap, the network and about
# 3 GB; `rm -rf DIR` removes it. DEBIAN_MIRROR overrides debootstrap's mirror.
set -e
root=${1:?make_hipcc.sh DIR}
command -v debootstrap >/dev/null || { echo "make_hipcc: install debootstrap with 'apt-get install debootstrap'"; exit 77; }
# debootstrap's mounts end with this mount namespace
unshare -m sh -e -c '
    debootstrap --variant=minbase unstable "$0" ${DEBIAN_MIRROR-}
    mount --rbind /proc "$0/proc"
    chroot "$0" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends hipcc gcc libc6-dev' "$root"
mkdir -p "$root/host"
# relative paths and paths below /tmp mean the same files inside and outside
cat >"$root/hipcc" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
exec unshare -m sh -e -c '
    root=$1 here=$2
    shift 2
    mount --rbind / "$root/host"
    mount --rbind /proc "$root/proc"
    mount --rbind /tmp "$root/tmp"
    exec chroot "$root" sh -c "cd \"\$0\" && exec /usr/bin/hipcc \"\$@\"" "/host$here" "$@"' sh "$root" "$PWD" "$@"
WRAPPER
chmod +x "$root/hipcc"
"$root/hipcc" --version
