use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::AgNumber;
use offshoot_xfs_format::superblock::XfsSuperblock;

use super::{HeldBack, held_back};
use crate::buffer::{XfsBuffers, sector_at};

#[test]
fn what_groups_keep_is_what_the_kernel_keeps() {
    let Some(judges) = judges::require() else { return };
    for options in [
        "",
        "-b size=1024",
        "-b size=16384",
        "-b size=65536",
        "-m rmapbt=0",
        "-m reflink=0,rmapbt=0",
        "-i size=2048",
    ] {
        let disk = XfsDisk::create(&judges, 1 << 10);
        disk.mkfs(options);
        let bytes = sector_at(&*disk.device(), 0).unwrap();
        let XfsSuperblock { fields, geometry } = XfsSuperblock::parse(&bytes).unwrap();
        let groups = geometry.ag_count;
        let buffers = XfsBuffers::new(disk.device(), geometry, 1 << 20);
        let shown = disk.xfs_db(&["agresv"]);
        for (ag, line) in (0..groups).zip(shown.lines()) {
            let words: Vec<_> = line.split_whitespace().collect();
            let number = |name| {
                let at = words.iter().position(|word| *word == name).unwrap();
                words[at + 1].parse::<u64>().unwrap()
            };
            let theirs = HeldBack { reserved: number("reserved:"), used: number("used:") };
            let ours = held_back(&buffers, &fields, AgNumber(ag)).unwrap();
            assert_eq!(ours, theirs, "{options}: group {ag}");
        }
    }
}
