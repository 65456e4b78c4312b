# Makes a volume in image $1 with blocks of $3 bytes and the other arguments of mkfs.xfs, fills it
# through the kernel, and prints what the kernel says of its files. $2 says with what: `trees` of
# several levels, or `sparse` inode chunks.
set -e
image=$1 contents=$2 block=$3
shift 3
size=1g
[ "$contents" = trees ] || size=320m
mkfs.xfs -q -f -d file,name="$image",size=$size -b size="$block" "$@"
mount=$(mktemp -d)
trap 'cd /; umount "$mount"; rmdir "$mount"' EXIT
mount -t xfs -o loop "$image" "$mount"
cd "$mount"
if [ "$contents" = sparse ]; then
    fallocate -l 200m holes
    for size in 16m 1m 64k 4k; do
        i=0
        while [ $i -lt 64 ] && fallocate -l $size "fill$size.$i" 2> /dev/null; do i=$((i + 1)); done
    done
    # No free range has room for a whole chunk of 32 KiB.
    for i in $(seq 0 2000); do echo "fpunch $((i * 49152)) 24576"; done | xfs_io holes
    sync
    for i in $(seq 2000); do : > "f$i"; done
else
    mkdir d
    for i in $(seq 5000); do echo "$i" > "d/f$i"; done
    for i in $(seq 1 3 5000); do rm "d/f$i"; done
    dd if=/dev/zero of=big bs=1M count=16 status=none
    sync
    for i in $(seq 0 2 4094); do echo "fpunch $((i * 4096)) 4096"; done | xfs_io big
    cp --reflink=auto big clone
    for i in $(seq 1 8 4094); do echo "pwrite -q $((i * 4096)) 512"; done | xfs_io clone
    fallocate -l 1M allocated
    ln -s target link
    ln -s "$(printf 'x%.0s' $(seq 900))" long
    mknod null c 1 3
    mkfifo pipe
    setfattr -n user.a -v b d/f2
    setfattr -n user.large -v "$(printf 'y%.0s' $(seq 5000))" d/f3
    touch -d 2300-01-01T00:00:00.123456789Z d/f5
    touch -d 1950-01-01T00:00:00Z d/f6
fi
find . -xdev -exec stat -c '%i %f %s %h %.9Y %t %T' {} +
