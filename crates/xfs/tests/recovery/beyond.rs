//! Logs that this kernel (6.18) does not recover, and that we do.

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_vfs::FileSystem;
use offshoot_xfs::{XfsOptions, XfsVolume};

use crate::crashed::settle;

/// Without a reverse map, the kernel exchanges whole forks of two files, and logs that the blocks
/// of their trees get other owners.
#[test]
fn files_that_exchanged_their_trees_have_them() {
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("first-v5");
    let disk = XfsDisk::create(&judges, kind.mib);
    disk.mkfs(kind.mkfs);
    let mount = disk.mount("rw,noatime", &[]);
    let files = ["one", "other"].map(|name| mount.path().join(name));
    for (path, byte) in files.iter().zip([1, 2]) {
        let file = fs::File::create(path).unwrap();
        for number in 0..3000 {
            file.write_all_at(&[byte; 4096], number * 8192).unwrap();
        }
        file.sync_all().unwrap();
    }
    drop(mount);
    let mut mount = disk.mount("rw,noatime", &[]);
    let [one, other] = ["one", "other"].map(|name| mount.path().join(name));
    disk.xfs_io(&one, &[&format!("swapext {}", other.display()), "fsync"]);
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    // The kernel proves the checksum of such an inode before it has made it, and does not mount.
    XfsVolume::recover(&disk.writable_device(), &XfsOptions::default()).unwrap().unwrap();
    disk.assert_checks();
    let mount = disk.mount("rw,noatime", &[]);
    for (name, byte) in [("one", 2), ("other", 1)] {
        let content = fs::read(mount.path().join(name)).unwrap();
        assert!(content.chunks(8192).all(|chunk| chunk[..4096] == [byte; 4096]), "{name}");
    }
}

/// A directory whose blocks have 16 KiB, in a volume whose free space is single blocks of 4 KiB.
/// The kernel recovers no such log: it proves the first extent of a block as a whole one.
#[test]
fn directory_blocks_of_several_extents_are_recovered() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 100);
    disk.mkfs("--unsupported -n size=16384 -m rmapbt=0,reflink=0 -i nrext64=0 -d agcount=1");
    let mount = disk.mount("rw,noatime", &[]);
    let (filler, dir) = (mount.path().join("filler"), mount.path().join("directory"));
    fs::create_dir(&filler).unwrap();
    fs::create_dir(&dir).unwrap();
    let mut count = 0_u64;
    while fs::write(filler.join(count.to_string()), [1; 4096]).is_ok() {
        count += 1;
        if count.is_multiple_of(500) {
            mount.sync();
        }
    }
    mount.sync();
    (0..count).step_by(2).for_each(|file| fs::remove_file(filler.join(file.to_string())).unwrap());
    mount.sync();
    drop(mount);
    // What is free in larger pieces is taken. A line is `from to extents blocks pct`.
    let table = disk.xfs_db(&["freesp"]);
    let lines = table.lines().map(|line| line.split_whitespace().map(str::parse::<u64>));
    let lines = lines.filter_map(|line| line.take(4).collect::<Result<Vec<_>, _>>().ok());
    let blocks: u64 = lines.filter(|line| line.len() == 4 && line[0] > 1).map(|line| line[3]).sum();
    let mount = disk.mount("rw,noatime", &[]);
    let file = fs::File::create(mount.path().join("rest")).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, blocks * 4096).unwrap();
    drop(file);
    drop(mount);
    let mut mount = disk.mount("rw,noatime", &[]);
    let dir = mount.path().join("directory");
    for number in 0..1500 {
        fs::File::create(dir.join(format!("a name with the number {number}"))).unwrap();
    }
    let ino = XfsDisk::ino(&dir);
    fs::File::open(&dir).unwrap().sync_all().unwrap();
    (0..900).for_each(|number| {
        fs::remove_file(dir.join(format!("a name with the number {number}"))).unwrap();
    });
    settle(mount.path());
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    let options = XfsOptions::default();
    let ours = XfsVolume::open(disk.device(), &options).unwrap();
    assert_eq!(list(&*ours, "directory").len(), 600);
    let recovered = XfsVolume::recover(&disk.writable_device(), &options).unwrap();
    assert!(recovered.is_some());
    disk.assert_checks();
    let extents = disk.field(&[&format!("inode {ino}")], "core.nextents");
    assert!(extents > 12, "{extents} extents");
    let mount = disk.mount("rw,noatime", &[]);
    let compare = Compare::default().without(Aspect::StoredAcls);
    compare.run(&*ours, mount.path()).assert_same(8000);
}

/// The names in a directory of the root.
fn list(fs: &dyn FileSystem, name: &str) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let dir = fs.lookup(fs.root(), name.as_bytes()).unwrap();
    fs.read_dir(dir, 0, &mut |entry| {
        names.push(entry.name.to_vec());
        ControlFlow::Continue(())
    })
    .unwrap();
    names
}
