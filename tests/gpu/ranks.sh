#!/usr/bin/env bash
# Two ranks on one Linux machine with a GPU and without a container engine: each a systemd in namespaces of its own, over an overlay of the
# machine's root, with an address on a private bridge, reached by ssh. As root; the machine itself is not changed but for that bridge.
#   tests/gpu/ranks.sh up      [STATE]     STATE (/run/k3ranks) holds the overlays in memory, the ssh key and known_hosts
#   tests/gpu/ranks.sh down    [STATE]
# Wanted on the machine: systemd, dbus, openssh-server, iproute2 (installed, not running). MODELS and SRC are directories that the ranks see
# as /srv/models and /srv/src. The inventory that speaks of these ranks is tests/gpu/inventory.
set -euo pipefail
verb=${1:?up or down}
state=${2:-/run/k3ranks}
bridge=k3ranks net=10.77.61 ranks=(gpu0 gpu1)
# Where the machine's own tree of control groups is a mixed one, the new one is seen through a mount of its own.
groups=/sys/fs/cgroup
[ "$(stat -fc %T $groups)" = cgroup2fs ] || groups=/run/k3ranks-cgroup
models=${MODELS:-/srv/models} src=${SRC:-/srv/src}

down() {
    for rank in "${ranks[@]}"; do
        if [ -s "$state/$rank/pid" ]; then kill -KILL "$(cat "$state/$rank/pid")" 2>/dev/null || true; fi
        ip link delete "k3-$rank" 2>/dev/null || true
    done
    ip link delete $bridge 2>/dev/null || true
    sleep 0.2
    findmnt -rno TARGET | grep "^$state/" | sort -r | while read -r place; do umount -l "$place"; done || true
    for group in "$groups"/k3-gpu*; do [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2> /dev/null || true; done
    if [ "$groups" != /sys/fs/cgroup ] && mountpoint -q "$groups"; then umount -l "$groups"; fi
    [ ! -d "$state" ] || rm -rf --one-file-system "$state"
}

# What one rank boots: nothing of the machine's own services, and no file system of its fstab.
furnish() {
    local root=$1 name=$2
    rm -rf "$root/etc/systemd/system" "$root/etc/fstab" "$root/etc/ssh"
    mkdir -p "$root/etc/systemd/system" "$root/etc/ssh" "$root/root/.ssh" "$root/srv/models" "$root/srv/src" "$root/var/lib/dbus"
    : > "$root/etc/fstab"
    echo "$name" > "$root/etc/hostname"
    printf '127.0.0.1 localhost\n%s.10 gpu0\n%s.11 gpu1\n' $net $net > "$root/etc/hosts"
    tr -d - < /proc/sys/kernel/random/uuid > "$root/etc/machine-id"
    rm -f "$root/var/lib/dbus/machine-id" "$root/run/nologin" "$root/etc/nologin"
    for user in messagebus sshd; do
        grep -q "^$user:" "$root/etc/passwd" || chroot "$root" useradd --system --no-create-home --shell /usr/sbin/nologin "$user"
    done
    for unit in systemd-udevd systemd-udev-trigger systemd-networkd systemd-resolved systemd-timesyncd systemd-logind getty@ systemd-binfmt; do
        ln -s /dev/null "$root/etc/systemd/system/$unit.service"
    done
    cat > "$root/etc/systemd/system/ssh.service" <<UNIT
[Service]
RuntimeDirectory=sshd
ExecStart=/usr/sbin/sshd -D -e -o UsePAM=no -o MaxStartups=100 -o MaxSessions=100
UNIT
    printf '[Unit]\nRequires=basic.target ssh.service\nAfter=basic.target ssh.service\nAllowIsolate=yes\n' \
        > "$root/etc/systemd/system/default.target"
    ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
    printf 'HostKey /etc/ssh/ssh_host_ed25519_key\nSubsystem sftp internal-sftp\n' > "$root/etc/ssh/sshd_config"
    install -m 600 "$state/id_ed25519.pub" "$root/root/.ssh/authorized_keys"
    # CUDA's libraries and the driver, as on a machine where they are installed.
    printf '%s\n' /usr/local/nvidia/lib64 /usr/local/cuda/lib64 > "$root/etc/ld.so.conf.d/k3-cuda.conf"
    ln -sfn /usr/local/nvidia/bin/nvidia-smi "$root/usr/local/bin/nvidia-smi"
}

# Runs inside the new namespaces, as their first process, and becomes systemd.
inside() {
    local root=$1 name=$2
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for node in null zero full random urandom tty nvidiactl nvidia-uvm nvidia-uvm-tools; do
        [ ! -e /dev/$node ] || { touch "$root/dev/$node"; mount --bind /dev/$node "$root/dev/$node"; }
    done
    for node in /dev/nvidia[0-9]*; do
        [ ! -e "$node" ] || { touch "$root$node"; mount --bind "$node" "$root$node"; }
    done
    mkdir -p "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    mount -t tmpfs tmpfs "$root/dev/shm"
    for place in /usr/local/nvidia; do
        [ ! -d $place ] || mount --rbind $place "$root$place"
    done
    chroot "$root" ldconfig
    mount --bind "$models" "$root/srv/models"
    mount --bind "$src" "$root/srv/src"
    hostname "$name"
    cd "$root"
    mkdir -p .before
    pivot_root . .before
    umount -l /.before
    exec env -i container=k3ranks PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        /usr/lib/systemd/systemd --log-target=journal < /dev/null > /dev/null 2>&1
}

up() {
    for program in ip sshd dbus-daemon /usr/lib/systemd/systemd; do
        command -v "$program" > /dev/null || { echo "$program is missing: install systemd, dbus, openssh-server and iproute2" >&2; exit 4; }
    done
    down
    mkdir -p "$state" "$models" "$src" "$groups"
    mountpoint -q "$groups" || mount -t cgroup2 none "$groups"
    chmod 700 "$state"
    ssh-keygen -q -t ed25519 -N '' -C k3ranks -f "$state/id_ed25519"
    ip link add $bridge type bridge
    ip address add $net.1/24 dev $bridge
    ip link set $bridge up
    local index=10
    for rank in "${ranks[@]}"; do
        local place=$state/$rank
        mkdir -p "$place"
        mount -t tmpfs -o size=80% k3rank "$place"
        mkdir "$place/upper" "$place/work" "$place/root"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$place/upper,workdir=$place/work" "$place/root"
        furnish "$place/root" "$rank"
        echo "$rank,$net.$index $(cut -d' ' -f1,2 "$place/root/etc/ssh/ssh_host_ed25519_key.pub")" >> "$state/known_hosts"
        mkdir -p "$groups/k3-$rank"
        # Its own session, so that it outlives this script; its own control group, so that the namespace shows nothing above it.
        setsid bash -c 'echo $$ > "$1/cgroup.procs"; exec unshare --fork --pid --mount --uts --ipc --cgroup --net --kill-child bash "$2" inside "$3" "$4"' \
            k3rank "$groups/k3-$rank" "$(readlink -f "$0")" "$place/root" "$rank" < /dev/null > "$place/log" 2>&1 &
        local unshare=$!
        until pgrep -P $unshare > /dev/null; do sleep 0.05; done
        pgrep -P $unshare > "$place/pid"
        ip link add "k3-$rank" type veth peer name eth0 netns "$(cat "$place/pid")"
        ip link set "k3-$rank" master $bridge up
        nsenter -t "$(cat "$place/pid")" -n ip address add $net.$index/24 dev eth0
        nsenter -t "$(cat "$place/pid")" -n ip link set eth0 up
        nsenter -t "$(cat "$place/pid")" -n ip link set lo up
        index=$((index + 1))
    done
    for index in 0 1; do
        for _ in $(seq 100); do
            said=$(ssh -i "$state/id_ed25519" -o UserKnownHostsFile="$state/known_hosts" -o BatchMode=yes -o ConnectTimeout=2 \
                "root@$net.$((10 + index))" systemctl is-system-running 2>&1 || true)
            case $said in running | degraded) break ;; esac
            sleep 0.1
        done
        echo "${ranks[index]}: $said"
    done
}

case $verb in
up) up ;;
down) down ;;
inside) inside "$2" "$3" ;;
*) echo "up or down" >&2; exit 2 ;;
esac
