//! Volumes that grow, beside volumes that the kernel makes grow.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::compare::Compare;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::fill;
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{Code, FileSystem};
use offshoot_xfs::{XfsFindingCode, XfsOptions, XfsVolume, check_xfs, grow_xfs};

const MIB: u64 = 1 << 20;

fn lengthen(disk: &XfsDisk, bytes: u64) {
    File::options().write(true).open(disk.image()).unwrap().set_len(bytes).unwrap();
}

/// The fields of the superblock and of the headers of groups that say how large the volume is and
/// where it has space. The kernel fills the free list of a new group later than we do.
fn sizes(disk: &XfsDisk) -> Vec<String> {
    let mut all = Vec::new();
    let mut add = |place: &str, names: &[&str]| {
        let sum: u64 = names.iter().map(|name| disk.field(&[place], name)).sum();
        all.push(format!("{place} {} {sum}", names.join(" + ")));
    };
    for name in ["dblocks", "agcount", "fdblocks", "icount", "ifree"] {
        add("sb 0", &[name]);
    }
    for number in 0..disk.field(&["sb 0"], "agcount") {
        let (agf, agi) = (format!("agf {number}"), format!("agi {number}"));
        for names in
            [&["length"][..], &["freeblks", "flcount"], &["longest", "flcount"], &["btreeblks"]]
        {
            add(&agf, names);
        }
        for name in ["length", "count", "freecount"] {
            add(&agi, &[name]);
        }
    }
    all
}

/// A volume in use of `bytes` bytes, made with these options.
fn used(judges: &judges::XfsJudges, bytes: u64, options: &str, seed: u64) -> XfsDisk {
    let disk = XfsDisk::create(judges, bytes.div_ceil(MIB));
    disk.mkfs(&format!("{options} -d size={bytes}"));
    let mount = disk.mount("rw", &[]);
    fill::some(mount.path(), seed);
    drop(mount);
    disk
}

fn grow(disk: &XfsDisk) -> (u64, u64) {
    let device = disk.writable_device();
    let grown = grow_xfs(&device, device.size_bytes(), &XfsOptions::default()).unwrap();
    (grown.old_bytes, grown.bytes)
}

/// Ours gives the headers and the free space that `xfs_growfs` gives, the judges find nothing, all
/// files are as they were, and the kernel fills what is new.
#[test]
fn volumes_grow_as_the_kernel_makes_them_grow() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let features = "-m reflink=1,rmapbt=1,finobt=1,inobtcount=1";
    for (options, before, after) in [
        // The last group is full, part of one, and new groups with a part of one.
        (features, 512 * MIB, 1024 * MIB),
        (&format!("{features} -d agsize=128m"), 400 * MIB, 500 * MIB),
        (&format!("{features} -d agsize=128m"), 400 * MIB, 1000 * MIB + 4096 * 7),
        ("-b size=1024 -m reflink=0,rmapbt=0 -d agsize=96m", 330 * MIB, 700 * MIB),
        ("-s size=4096 -d agsize=100m", 450 * MIB, 900 * MIB),
        // Fewer than 64 blocks, and exactly so many.
        (&format!("{features} -d agsize=128m"), 384 * MIB, 512 * MIB + 63 * 4096),
        (&format!("{features} -d agsize=128m"), 384 * MIB, 512 * MIB + 64 * 4096),
    ] {
        let what = format!("{options}, {before} to {after}");
        let disk = used(&judges, before, options, seed);
        let was = disk.copy();
        let kernel = disk.copy();
        for grown in [&disk, &kernel] {
            lengthen(grown, after);
        }
        let (old, new) = grow(&disk);
        assert_eq!((old, after - new < 64 * 4096), (before, true), "{what}: {new}");
        disk.assert_checks();
        let mount = kernel.mount("rw", &[]);
        run("xfs_growfs", &[mount.path()]);
        drop(mount);
        assert_eq!(sizes(&disk), sizes(&kernel), "{what}");
        let volume = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
        let before = XfsVolume::open(was.device(), &XfsOptions::default()).unwrap();
        let outcome = Compare::default().run_filesystems(&*volume, &*before);
        assert!(outcome.differences.is_empty(), "{what}: {outcome}");
        drop(volume);
        let mount = disk.mount("rw", &[]);
        let room = HostFilesystem::new(mount.path()).unwrap().statfs().unwrap();
        let file = mount.path().join("new file");
        run(
            "fallocate",
            &[
                "-l".as_ref(),
                (room.available_bytes / 10 * 9).to_string().as_ref(),
                file.as_os_str(),
            ],
        );
        drop(mount);
        disk.assert_checks();
        // Nothing is left to do, and XFS does not shrink.
        assert_eq!(grow(&disk), (new, new), "{what}");
    }
}

#[test]
fn a_volume_does_not_shrink() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 400);
    disk.mkfs("");
    let before = fs::read(disk.image()).unwrap();
    let device = disk.writable_device();
    let error = grow_xfs(&device, 350 * MIB, &XfsOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::NotInFormat, "{error}");
    assert!(fs::read(disk.image()).unwrap() == before);
}

/// A power cut at any write leaves one of the three sizes and all files.
#[test]
fn a_cut_leaves_a_whole_volume() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let disk = used(&judges, 400 * MIB, "-d agsize=128m -m rmapbt=1", seed);
    let was = XfsVolume::open(disk.copy().device(), &XfsOptions::default()).unwrap();
    lengthen(&disk, 700 * MIB);
    let device = Arc::new(CrashDevice::new(disk.device()));
    let cut: Arc<dyn BlockDevice> = device.clone();
    grow_xfs(&cut, 700 * MIB, &XfsOptions::default()).unwrap();
    let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 6, seed, tears: false };
    let states: Vec<_> = device.log().states(&plan).map(Result::unwrap).collect();
    let compare = Compare::default();
    let (mut sizes, count) = (BTreeSet::new(), states.len() as u64);
    let chosen: Vec<_> = (0..3).map(|_| random.below(count)).collect();
    for (number, state) in (0..).zip(states) {
        let described = state.description.clone();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        if chosen.contains(&number) {
            let copy = disk.copy();
            let device = copy.writable_device();
            memory.visit_changes(&mut |at, bytes| device.write_at(at, bytes)).unwrap();
            drop(device);
            drop(copy.mount("rw", &[RECOVERY]));
            grow(&copy);
            copy.assert_checks();
        }
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        XfsVolume::recover(&device, &XfsOptions::default())
            .unwrap_or_else(|error| panic!("{described}: {error}"));
        let ours = XfsVolume::open(device.clone(), &XfsOptions::default()).unwrap();
        sizes.insert(ours.superblock().geometry.blocks * 4096 / MIB);
        let outcome = compare.run_filesystems(&*ours, &*was);
        assert!(outcome.differences.is_empty(), "{described}: {outcome}");
        drop(ours);
        let mut findings = check_xfs(&device, &XfsOptions::default()).unwrap().findings;
        // The copies of the superblock are written last, or by the next call.
        findings.retain(|finding| finding.code != XfsFindingCode::SuperblockCopy);
        assert!(findings.is_empty(), "{described}: {findings:?}");
        let grown = grow_xfs(&device, 700 * MIB, &XfsOptions::default()).unwrap();
        assert_eq!(grown.bytes, 700 * MIB, "{described}");
        let findings = check_xfs(&device, &XfsOptions::default()).unwrap().findings;
        assert!(findings.is_empty(), "{described}: {findings:?}");
    }
    assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [400, 512, 700]);
}
