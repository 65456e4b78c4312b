//! Volumes with quotas: groups that contain others, and subvolumes that share extents.

use std::path::Path;

use offshoot_btrfs_format::quota::QgroupId;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::run::run;

/// The group of the first subvolume.
pub(crate) const SUBVOLUME: QgroupId = QgroupId(256);
/// The group 1/1.
pub(crate) const CONTAINED: QgroupId = QgroupId((1 << 48) + 1);
/// The group 2/1, which contains 1/1.
pub(crate) const HIGHEST: QgroupId = QgroupId((2 << 48) + 1);

/// Groups of three levels: 2/1 contains 1/1 and 1/2, which contain some subvolumes.
pub(crate) const FULL: &str = "
    btrfs quota enable .; btrfs quota rescan -w .
    for g in 1/1 1/2 2/1; do btrfs qgroup create $g .; done
    btrfs qgroup assign --no-rescan 1/1 2/1 .; btrfs qgroup assign --no-rescan 1/2 2/1 .
";

/// The same with simple quotas.
pub(crate) const SIMPLE: &str = "
    echo before > before; sync; btrfs quota enable --simple .
    for g in 1/1 1/2 2/1; do btrfs qgroup create $g .; done
    btrfs qgroup assign --no-rescan 1/1 2/1 .; btrfs qgroup assign --no-rescan 1/2 2/1 .
";

/// Subvolumes with shared extents and blocks, and one that was deleted.
const FILL: &str = "
    for v in a b c d; do
        btrfs subvolume create $v
        for i in $(seq 300); do echo $v $i > $v/$i; done
        head -c 3000000 /dev/urandom > $v/data
    done
    cp --reflink=always a/data b/shared
    for i in 1 2 3; do
        btrfs subvolume snapshot a s$i; head -c 500000 /dev/urandom > a/new-$i
        rm -f a/5$i; dd if=/dev/zero of=a/data bs=4096 count=10 seek=$i conv=notrunc status=none
    done
    btrfs subvolume delete -c d; btrfs subvolume delete -c s2
    btrfs subvolume sync .; sync
";

const ASSIGN: &str = "
    for p in 'a 1/1' 'b 1/1' 's1 1/2'; do
        set -- $p
        btrfs qgroup assign --no-rescan 0/$(btrfs inspect-internal rootid $1) $2 .
    done
    # Simple quotas have no rescan.
    btrfs quota rescan -w . || true; sync
";

/// Runs a script in a directory.
pub(crate) fn shell(dir: &Path, script: &str) {
    run("sh", &["-ec", &format!("cd '{}'; {script}", dir.display())]);
}

/// A volume that a script filled.
pub(crate) fn made(judges: &Judges, mkfs: &[&str], script: &str) -> Disks {
    let disks = Disks::create(judges, 1, 512);
    disks.mkfs_and_settle(mkfs);
    let mount = disks.mount("rw,noatime");
    shell(mount.path(), script);
    mount.sync();
    drop(mount);
    disks
}

/// A volume with full quotas.
pub(crate) fn full(judges: &Judges, mkfs: &[&str]) -> Disks {
    made(judges, mkfs, &format!("{FULL}{FILL}{ASSIGN}"))
}

/// A volume with simple quotas.
pub(crate) fn simple(judges: &Judges) -> Disks {
    made(judges, &["-n", "4k"], &format!("{SIMPLE}{FILL}{ASSIGN}"))
}
