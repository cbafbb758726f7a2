#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Boots a Debian kernel in QEMU from an initial file system made here, runs a script in it as root, powers off.
#   scripts/vm.sh PACKAGE OVERLAY SCRIPT
#     PACKAGE  a kernel package, e.g. linux-image-6.1.0-57-amd64; downloaded (not installed) and cached
#     OVERLAY  a folder that is copied into the virtual machine's root
#     SCRIPT   run by dash; busybox's applets, ip, tc, ethtool and bpftool (as far as this machine has
#              them) are on its PATH, bpffs is mounted, the modules below are loaded, lo is up
#   VM_CACHE    where kernels are kept (XDG_CACHE_HOME/metaroce-kernels or /var/tmp/metaroce-kernels)
#   VM_CPUS     2        VM_MIB  2560        VM_SECONDS  1100, after which the machine is ended
#   VM_MODULES  loaded in this order with what they need; one that a kernel has not is left out
# The console goes to standard output. Exit status: the script's; 125 if the machine ended before it did.
#   VM_ACCEL    tcg,thread=single: emulated, which runs everywhere, inside virtual machines too; kvm is faster.
#               With thread=multi a processor now and then executes a breakpoint that the kernel has already
#               taken away while it patched the XDP dispatcher, and the kernel panics (int3 in bpf_dispatcher_xdp_func)
#   VM_PAIRS    none; the virtio-net-pci interfaces that the machine gets, some of:
#               plain     two with MTU 1500 and one queue, whose guest offloads are off
#               jumbo     two with MTU 9000, else the same
#               queues    two with MTU 1500 and 4 queues; the driver may turn their guest offloads off
#               offloads  one whose guest offloads are on and stay on
#               Two are joined to each other and to nothing else. Link addresses are 02:4d:52:76:PAIR:END, pairs
#               numbered from 0 in this order. The last two have taps in a network namespace of QEMU's own, which
#               ends with it: they need root and /dev/net/tun, and are left out, saying so, where these lack.
set -euo pipefail
pkg=${1:?package} overlay=${2:?overlay} script=${3:?script}
: "${VM_CACHE:=${XDG_CACHE_HOME:-/var/tmp}/metaroce-kernels}" "${VM_CPUS:=2}" "${VM_MIB:=2560}" "${VM_SECONDS:=1100}"
: "${VM_ACCEL:=tcg,thread=single}"
: "${VM_MODULES:=veth dummy 8021q sch_ingress cls_bpf sch_tbf sch_htb sch_netem virtio_pci virtio_net}"
: "${VM_PAIRS:=}"
export PATH=$PATH:/usr/sbin:/sbin
if [[ $(uname -m) != x86_64 ]]; then
	echo "vm: machine $(uname -m), want x86_64: the test binaries and kernels are amd64's" >&2
	exit 2
fi
kernel=$VM_CACHE/$pkg version=${pkg#linux-image-}
work=$(mktemp -d "${TMPDIR:-/tmp}/metaroce-vm.XXXXXX")
trap 'rm -rf "$work"' EXIT

# The cache is filled beside its place and moved there whole, so that a download that was cut short never counts.
if [[ ! -e $kernel/boot/vmlinuz-$version ]]; then
	echo "vm: downloading $pkg into $VM_CACHE" >&2
	mkdir -p "$VM_CACHE"
	find "$VM_CACHE" -maxdepth 1 -name '.new.*' -mmin +60 -exec rm -rf {} +
	new=$(mktemp -d "$VM_CACHE/.new.XXXXXX")
	trap 'rm -rf "$work" "$new"' EXIT
	# apt fetches as its own user, which must be allowed to write here.
	chmod 777 "$new"
	if ! (cd "$new" && timeout 300 apt-get -q -o Acquire::Retries=2 download "$pkg" >&2); then
		echo "vm: apt-get could not download $pkg" >&2
		exit 3
	fi
	dpkg-deb -x "$new"/*.deb "$new/root"
	if [[ -d $new/root/usr/lib/modules && ! -e $new/root/lib ]]; then ln -s usr/lib "$new/root/lib"; fi
	depmod -b "$new/root" "$version"
	rm -rf "${kernel:?}"
	mv "$new/root" "$kernel"
	rm -rf "$new"
fi

root=$work/root
mkdir -p "$root"/{bin,sbin,etc,proc,sys,dev,tmp,run,var/tmp,root,usr/bin,modules}
ln -s /run "$root/var/run"

# with_libraries FILE TO copies a program and what it is linked to.
with_libraries() {
	local file=$1 to=$2 lib
	install -D -m 755 "$(readlink -f "$file")" "$root/$to"
	{ ldd "$file" 2>/dev/null || true; } | { grep -o '/[^ ]*' || true; } | while read -r lib; do
		if [[ ! -e $root$lib ]]; then install -D "$(readlink -f "$lib")" "$root$lib"; fi
	done
}
busybox=$(command -v busybox)
cp "$busybox" "$root/bin/busybox"
# Not busybox's sh: it prefers its own applets to what is on PATH. Not its ip: too small.
for applet in $("$busybox" --list); do
	case $applet in sh | ash | ip | tc | busybox) ;; *) ln -s busybox "$root/bin/$applet" ;; esac
done
with_libraries "$(command -v dash)" bin/sh
for program in ip tc ethtool bpftool; do
	path=$(command -v "$program" || true)
	if [[ -n $path ]]; then with_libraries "$path" "usr/bin/$program"; fi
done
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
printf '127.0.0.1 localhost vm\n::1 localhost\n' >"$root/etc/hosts"
: >"$root/modules/order"
for module in $VM_MODULES; do
	{ modprobe -d "$kernel" -S "$version" --show-depends "$module" 2>/dev/null || true; } |
		{ grep -o '/[^ ]*\.ko[^ ]*' || true; } | while read -r ko; do
		name=$(basename "$ko")
		name=${name%.xz} && name=${name%.zst}
		[[ ! -e $root/modules/$name ]] || continue
		case $ko in
		*.xz) xz -dc "$ko" >"$root/modules/$name" ;;
		*.zst) zstd -qdc "$ko" >"$root/modules/$name" ;;
		*) cp "$ko" "$root/modules/$name" ;;
		esac
		echo "$name" >>"$root/modules/order"
	done
done
cp -a "$overlay/." "$root/"
install -m 755 "$script" "$root/vm-script"
cat >"$root/init" <<'INIT'
#!/bin/sh
export PATH=/usr/bin:/bin:/sbin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm && mount -t devpts pts /dev/pts && mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
while read -r module; do insmod "/modules/$module" || echo "vm: insmod $module failed"; done </modules/order
hostname vm
ip link set lo up
cd /tmp
sh /vm-script </dev/null
echo "vm-exit-status: $?"
poweroff -f
INIT
chmod 755 "$root/init"
(cd "$root" && find . -print0 | cpio -0 -o -H newc --quiet) >"$work/initrd"

# The back ends that hubs cannot be: several queues, and offloads of the guest.
cat >"$work/taps" <<'TAPS'
#!/bin/sh
# Makes the taps in this network namespace, then runs the command.
set -e
echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
ip link add name bridge0 type bridge mcast_snooping 0
for name in tap20 tap21 tap30; do
	ip tuntap add dev "$name" mode tap multi_queue vnet_hdr
	# More than a connection may have under way: nothing is to be lost here.
	ip link set dev "$name" txqueuelen 10000 up
done
ip link set dev tap20 master bridge0
ip link set dev tap21 master bridge0
ip link set dev bridge0 up
exec "$@"
TAPS
with_taps=(unshare --net -- sh "$work/taps")
qemu=(qemu-system-x86_64) network=()

# nic PAIR END NETDEV PROPERTIES adds an interface.
nic() {
	network+=(-netdev "$3,id=net$1$2" -device "virtio-net-pci,netdev=net$1$2,mac=02:4d:52:76:0$1:0$2,$4")
}
no_offloads=guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off tap=script=no,downscript=no,vhost=off,queues
for pair in $VM_PAIRS; do
	if [[ $pair == queues || $pair == offloads ]]; then
		if ! problem=$("${with_taps[@]}" true 2>&1); then
			echo "vm: no interfaces \"$pair\", since taps cannot be made here: $problem"
			continue
		fi
		qemu=("${with_taps[@]}" qemu-system-x86_64)
	fi
	case $pair in
	plain) for end in 0 1; do nic 0 $end hubport,hubid=0 "$no_offloads"; done ;;
	jumbo) for end in 0 1; do nic 1 $end hubport,hubid=1 "$no_offloads,host_mtu=9000"; done ;;
	queues) for end in 0 1; do nic 2 $end "tap,ifname=tap2$end,$tap=4" mq=on,vectors=10; done ;;
	offloads) nic 3 0 "tap,ifname=tap30,$tap=2" mq=on,vectors=6,ctrl_guest_offloads=off ;;
	*) echo "vm: VM_PAIRS has \"$pair\", want plain, jumbo, queues or offloads" >&2 && exit 2 ;;
	esac
done

# A kernel that panics reboots at once, which -no-reboot turns into the machine's end.
timeout -k 10 "$VM_SECONDS" "${qemu[@]}" -accel "$VM_ACCEL" -machine q35 -cpu max -smp "$VM_CPUS" -m "$VM_MIB" \
	-nodefaults -nic none -display none -serial stdio -no-reboot "${network[@]}" \
	-kernel "$kernel/boot/vmlinuz-$version" -initrd "$work/initrd" \
	-append "console=ttyS0 quiet panic=-1 oops=panic mitigations=off" </dev/null | tr -d '\r' | tee "$work/console" || true
status=$(sed -n 's/.*vm-exit-status: \([0-9]\{1,3\}\)$/\1/p' "$work/console" | tail -n 1)
if [[ -z $status ]]; then
	echo "vm: $pkg ended without the script's exit status (limit $VM_SECONDS s)" >&2
	exit 125
fi
exit "$status"
