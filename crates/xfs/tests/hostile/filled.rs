//! The volumes of the sweep: every form of metadata, and little of each.

#![allow(dead_code, reason = "each of the programs that share this calls a part of it")]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use offshoot_testkit::fill::{directory, write};
use offshoot_testkit::random::Random;
use offshoot_testkit::xfs::churn::{ChurnPlan, churn};
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges::XfsJudges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;
use rustix::fs::{XattrFlags, lsetxattr};

/// A volume of the sweep, by the name of its kind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostileXfs {
    Clean(&'static str),
    /// Its log has to be replayed.
    Dirty(&'static str),
}

pub(crate) const VOLUMES: [HostileXfs; 6] = [
    HostileXfs::Clean("today-1k"),
    HostileXfs::Clean("first-v5"),
    HostileXfs::Clean("block-2k-dir-8k"),
    HostileXfs::Clean("v4-block-512"),
    HostileXfs::Dirty("today-1k"),
    HostileXfs::Dirty("usual"),
];

impl HostileXfs {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Clean(name) | Self::Dirty(name) => name,
        }
    }
}

pub(crate) fn make(judges: &XfsJudges, volume: HostileXfs) -> XfsDisk {
    let kind = XfsVolumeKind::named(volume.name());
    if let HostileXfs::Clean(_) = volume {
        return XfsRecipe::new(kind).fill(every_form).make(judges).disk;
    }
    let disk = XfsDisk::create(judges, kind.mib);
    disk.mkfs(kind.mkfs);
    let mut mount = disk.mount("rw,noatime", kind.kernel_says);
    every_form(mount.path());
    mount.sync();
    let plan = ChurnPlan { has_clones: true, has_removals: true };
    churn(&directory(mount.path(), "changed"), plan, 60, &mut Random::new(7));
    // They are on the lists of unlinked inodes when the log ends.
    let names = ["removed", "removed too"].map(|name| mount.path().join(name));
    let open = names.each_ref().map(|name| File::create(name).unwrap());
    for name in &names {
        fs::remove_file(name).unwrap();
    }
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(open);
    drop(mount);
    disk
}

/// Every form of forks, directories and attributes. Volumes of version 4 are filled from a list,
/// which has no blanks in names, and no values of other letters.
fn every_form(root: &Path) {
    for (name, entries) in [("short", 3), ("block", 40), ("leaf", 150), ("node", 700)] {
        let dir = directory(root, name);
        (0..entries).for_each(|number| write(&dir.join(format!("entry-number-{number}")), b""));
    }
    let tree = File::create(root.join("tree")).unwrap();
    for number in 0..200 {
        tree.write_all_at(&[b't'; 4096], number * 8192).unwrap();
    }
    write(&root.join("data"), &vec![b'd'; 50_000]);
    // Volumes without shared blocks refuse it.
    let clone = File::create(root.join("clone")).unwrap();
    let _ = rustix::fs::ioctl_ficlone(&clone, File::open(root.join("data")).unwrap());
    symlink("data", root.join("link")).unwrap();
    symlink("t".repeat(900), root.join("long-link")).unwrap();
    fs::hard_link(root.join("data"), root.join("second-name")).unwrap();
    for (name, count, len) in [("few", 2, 10), ("leaf-of", 12, 60), ("node-of", 120, 90)] {
        let file = root.join(format!("{name}-attributes"));
        write(&file, b"");
        for number in 0..count {
            let name = format!("user.number.{number}");
            lsetxattr(&file, name, &vec![b'v'; len], XattrFlags::empty()).unwrap();
        }
        lsetxattr(&file, "user.large", &[b'v'; 5000], XattrFlags::empty()).unwrap();
    }
}
