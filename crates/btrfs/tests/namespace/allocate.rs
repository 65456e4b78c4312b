//! Preallocating, punching and zeroing files: the kernel and we do the same to two volumes, and get
//! the same result.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use offshoot_btrfs_format::file_extent::FileExtentBody;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::{judges, sharing};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_vfs::{Errno, Fallocate, FileId, FileSystem, FileSystemMut, SetAttr, XattrMode};
use rustix::fs::{FallocateFlags, SeekFrom};

use crate::common::{AT, NEW, at, check, judge, open_read_only, open_top, place};
use crate::layout::{SectorKind, for_each_extent, sectors};

const FILES: u64 = 300;
const STEPS: u64 = 6;

/// An operation on a file.
#[derive(Clone, Copy, Debug)]
enum AllocateOp {
    Write { offset: u64, len: usize },
    Truncate(u64),
    Fallocate(Fallocate, u64, u64),
}

impl AllocateOp {
    /// A small random range. Most ranges begin and end on sector boundaries (all of them if
    /// `is_whole`), so that ranges meet.
    fn random(random: &mut Random, is_whole: bool) -> Self {
        let mut place = |sectors: u64| match random.below(3) {
            0 if !is_whole => random.below(sectors * 4096),
            _ => random.below(sectors) * 4096,
        };
        let (offset, len) = (place(12), place(10) + 1);
        let len = if len % 4096 == 1 { len + 4095 } else { len };
        let written = if is_whole { len } else { len / 3 + 1 };
        match random.below(9) {
            0..2 => Self::Write { offset, len: usize::try_from(written).expect("small") },
            2 => Self::Truncate(offset),
            3 => Self::Fallocate(Fallocate::Allocate { keeps_size: false }, offset, len),
            4..6 => Self::Fallocate(Fallocate::Allocate { keeps_size: true }, offset, len),
            6 => Self::Fallocate(Fallocate::PunchHole, offset, len),
            7 => Self::Fallocate(Fallocate::Zero { keeps_size: false }, offset, len),
            _ => Self::Fallocate(Fallocate::Zero { keeps_size: true }, offset, len),
        }
    }

    fn ours(self, byte: u8, fs: &dyn FileSystemMut, file: FileId) {
        let done = match self {
            Self::Write { offset, len } => fs.write(file, offset, &vec![byte; len], AT),
            Self::Truncate(size) => {
                fs.set_attr(file, &SetAttr { size: Some(size), ..SetAttr::default() }, AT)
            }
            Self::Fallocate(what, offset, len) => fs.fallocate(file, what, offset, len, AT),
        };
        done.unwrap_or_else(|error| panic!("{self:?}: {error}"));
    }

    fn kernel(self, byte: u8, file: &File) {
        let done = match self {
            Self::Write { offset, len } => file.write_all_at(&vec![byte; len], offset),
            Self::Truncate(size) => file.set_len(size),
            Self::Fallocate(what, offset, len) => {
                let keep =
                    |keep| if keep { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
                let flags = match what {
                    Fallocate::Allocate { keeps_size } => keep(keeps_size),
                    Fallocate::Zero { keeps_size } => FallocateFlags::ZERO_RANGE | keep(keeps_size),
                    _ => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                };
                rustix::fs::fallocate(file, flags, offset, len).map_err(Into::into)
            }
        };
        done.unwrap_or_else(|error| panic!("{self:?}: {error}"));
    }
}

/// Requires that we find data and holes where the kernel does, from everywhere in the file and
/// behind it.
fn assert_seeks_alike(fs: &dyn FileSystem, file: FileId, kernel: &File) {
    for offset in (0..30 * 4096).step_by(1024) {
        let seek = |from| rustix::fs::seek(kernel, from).ok();
        assert_eq!(
            fs.seek_data(file, offset).ok(),
            seek(SeekFrom::Data(offset)),
            "from {offset} on"
        );
        assert_eq!(
            fs.seek_hole(file, offset).ok(),
            seek(SeekFrom::Hole(offset)),
            "from {offset} on"
        );
    }
}

/// Does short random sequences, each on a file of its own, with a sync after every step.
fn the_kernel_does_the_same(mkfs: &[&str]) {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let [theirs, ours] = [(); 2].map(|()| {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(mkfs);
        disks
    });
    let are_whole = |number: u64| number.is_multiple_of(3);
    let ops: Vec<Vec<AllocateOp>> = (0..FILES)
        .map(|number| {
            (0..STEPS).map(|_| AllocateOp::random(&mut random, are_whole(number))).collect()
        })
        .collect();
    let name = |number: usize| {
        let dir = if are_whole(number as u64) { "whole/" } else { "" };
        format!("{dir}file{number}")
    };
    let mount = theirs.mount("rw,noatime");
    let fs = open_top(&ours);
    std::fs::create_dir(mount.path().join("whole")).expect("a directory");
    let whole = fs.mkdir(place(fs.root(), "whole"), &NEW).expect("a directory");
    for number in 0..ops.len() {
        let path = name(number);
        File::create(mount.path().join(&path)).expect("a file");
        let made = match path.strip_prefix("whole/") {
            Some(name) => fs.create(place(whole, name), &NEW),
            None => fs.create(place(fs.root(), &path), &NEW),
        };
        made.expect("a file");
    }
    let mut cut = vec![BTreeSet::new(); ops.len()];
    for step in 0..STEPS {
        let byte = u8::try_from(step + 1).expect("small");
        for (number, ops) in ops.iter().enumerate() {
            let op = ops[usize::try_from(step).expect("small")];
            let file = File::options().write(true).open(mount.path().join(name(number)));
            op.kernel(byte, &file.expect("it opens"));
            let file = at(&fs, &name(number));
            op.ours(byte, &fs, file);
            cut[number].insert(fs.attr(file).expect("attributes").size / 4096);
            if let AllocateOp::Fallocate(_, offset, len) = op {
                let edges = [offset, offset + len].into_iter().filter(|edge| edge % 4096 > 0);
                cut[number].extend(edges.map(|edge| edge / 4096));
            }
        }
        rustix::fs::syncfs(File::open(mount.path()).expect("the root")).expect("a sync");
        fs.sync().expect("a commit");
    }
    let read = |number| std::fs::read(mount.path().join(name(number))).expect("it reads");
    let expected: Vec<_> = (0..ops.len()).map(read).collect();
    drop((mount, fs));
    judge(&ours, FILES);
    let their_mount = theirs.mount("ro,noatime");
    let mount = ours.mount("rw,noatime");
    let [our_whole, their_whole] = [&mount, &their_mount].map(|mount| mount.path().join("whole"));
    sharing::assert_alike(&our_whole, &their_whole, 0);
    drop(their_mount);
    let [their_fs, our_fs] = [&theirs, &ours].map(open_read_only);
    for name in (0..ops.len()).step_by(10).map(name) {
        let file = File::open(mount.path().join(&name)).expect("a file");
        assert_seeks_alike(&our_fs, at(&our_fs, &name), &file);
    }
    for (number, ops) in ops.iter().enumerate() {
        let name = name(number);
        // In sectors that are punched in part, or in which a file ends, the kernel may write zeros
        // where we do not.
        let [theirs, ours] = [&their_fs, &our_fs].map(|fs| {
            let is_inline = |(at, is)| (at, is == SectorKind::Inline);
            let all = sectors(fs, at(fs, &name)).into_iter().map(is_inline);
            all.filter(|(at, _)| !cut[number].contains(at)).collect::<Vec<_>>()
        });
        assert_eq!(ours, theirs, "where {name} is after {ops:?}");
        let path = mount.path().join(&name);
        let (found, bytes) = (path.metadata().expect("it is there"), &expected[number]);
        assert_eq!(found.len(), bytes.len() as u64, "size after {ops:?}");
        assert!(std::fs::read(&path).expect("it reads") == *bytes, "bytes after {ops:?}");
        let all = sectors(&our_fs, at(&our_fs, &name));
        if all.values().all(|&is| is != SectorKind::Inline) {
            assert_eq!(found.blocks() * 512, all.len() as u64 * 4096, "space after {ops:?}");
        }
    }
    drop((their_fs, our_fs));
    // The kernel writes into space that we allocated.
    for number in 0..ops.len() {
        let file = File::options().write(true).open(mount.path().join(name(number)));
        file.expect("it opens").write_all_at(&[8; 9000], 3000).expect("it writes");
    }
    drop(mount);
    check(&ours);
}

#[test]
fn the_kernel_allocates_and_punches_the_same() {
    the_kernel_does_the_same(&[]);
}

#[test]
fn the_kernel_allocates_and_punches_the_same_with_explicit_holes() {
    the_kernel_does_the_same(&["-n", "4k", "-O", "^no-holes"]);
}

/// On a full volume, space that was allocated before can still be written and punched.
#[test]
fn allocated_space_can_be_written_on_a_full_volume() {
    const LEN: u64 = 6 << 20;
    const PIECE: usize = 73 * 4096;
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 160);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let [kept, stream, filler] = ["kept", "stream", "filler"]
        .map(|name| fs.create(place(fs.root(), name), &NEW).expect("a file"));
    for file in [kept, stream] {
        let what = Fallocate::Allocate { keeps_size: true };
        fs.fallocate(file, what, 0, LEN, AT).expect("there is room");
    }
    let (mut end, mut piece) = (0, 1 << 20);
    while piece >= 4096 {
        match fs.write(filler, end, &vec![1; piece], AT) {
            Ok(()) => end += piece as u64,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                piece /= 2;
            }
        }
    }
    let data = Random::new(5).bytes(usize::try_from(LEN).expect("small"));
    // In pieces of whole sectors, from the last to the first.
    for start in (0..data.len()).step_by(PIECE).rev() {
        let part = &data[start..data.len().min(start + PIECE)];
        fs.write(kept, start as u64, part, AT).expect("the space is there");
    }
    // And in pieces of any size, which share sectors that are not written back yet.
    for (number, part) in data.chunks(1000).enumerate().take(2000) {
        fs.write(stream, number as u64 * 1000, part, AT).expect("the space is there");
    }
    let set = SetAttr { size: Some(1_500_500), ..SetAttr::default() };
    fs.set_attr(stream, &set, AT).expect("it is cut");
    let refused =
        fs.write(kept, LEN, &vec![1; 100_000], AT).expect_err("no space was allocated there");
    assert_eq!(refused.errno(), Errno::NOSPC, "{refused}");
    assert_eq!(fs.attr(kept).expect("attributes").size, LEN);
    fs.fallocate(filler, Fallocate::PunchHole, 4096, end / 2, AT).expect("it makes room");
    fs.sync().expect("a commit");
    fs.write(kept, LEN, &vec![1; 100_000], AT).expect("there is room now");
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 3);
    let mount = disks.mount("ro");
    let read = |name| std::fs::read(mount.path().join(name)).expect("it reads");
    for (name, len) in [("kept", data.len()), ("stream", 1_500_500)] {
        let found = read(name);
        let differs = found.iter().zip(&data[..len]).position(|(found, written)| found != written);
        assert_eq!(differs, None, "{name}: first byte that differs of {}", found.len());
        assert!(found.len() == len || name == "kept", "{name} has {} bytes", found.len());
    }
}

/// Regression: in mixed groups, a preallocation reserved data and then waited for metadata. Both
/// come from the same groups, so it waited for itself.
#[test]
fn allocation_goes_on_until_mixed_groups_are_full() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 160);
    disks.mkfs(&["--mixed", "-n", "4096"]);
    let fs = open_top(&disks);
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    let (mut end, mut piece) = (0, 64 << 20);
    while piece >= 4096 {
        match fs.fallocate(file, Fallocate::Allocate { keeps_size: false }, end, piece, AT) {
            Ok(()) => end += piece,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                piece /= 2;
            }
        }
    }
    assert!(end > 100 << 20, "only {end} bytes were allocated");
    fs.sync().expect("a commit");
    fs.fallocate(file, Fallocate::PunchHole, 0, end, AT).expect("it makes room");
    fs.unlink(place(fs.root(), "file"), AT).expect("it goes");
    fs.sync().expect("a commit");
    drop(fs);
    check(&disks);
}

/// Regression: punching a hole into an extent makes the trees larger. It used up the space that is
/// kept for removals.
#[test]
fn removals_work_after_punching_on_full_metadata() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 64);
    disks.mkfs(&["-m", "single", "-n", "4k", "-O", "^no-holes"]);
    let fs = open_top(&disks);
    let large = fs.create(place(fs.root(), "large"), &NEW).expect("a file");
    fs.write(large, 0, &vec![1; 6 << 20], AT).expect("there is room");
    fs.sync().expect("a commit");
    let is_refused = |done: offshoot_vfs::Result<()>| {
        done.is_err_and(|error| {
            assert_eq!(error.errno(), Errno::NOSPC, "{error}");
            true
        })
    };
    let mut made = 0;
    while let Ok(file) = fs.create(place(fs.root(), &format!("file{made}")), &NEW) {
        made += 1;
        if is_refused(fs.set_xattr(file, b"user.fill", &[1; 3000], XattrMode::Set, AT)) {
            break;
        }
    }
    let punch = |number: u64| fs.fallocate(large, Fallocate::PunchHole, number * 8192, 4096, AT);
    let refused = (0..700).filter(|&number| is_refused(punch(number))).count();
    println!("{made} files made, {refused} holes refused");
    for number in 0..made {
        fs.unlink(place(fs.root(), &format!("file{number}")), AT)
            .expect("a removal is not refused");
    }
    fs.unlink(place(fs.root(), "large"), AT).expect("a removal is not refused");
    fs.sync().expect("a commit");
    drop(fs);
    check(&disks);
}

/// Space that a snapshot or a clone shares is not written in place.
#[test]
fn shared_space_is_written_elsewhere() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let names = ["alone", "kept", "cloned"];
    for name in names {
        let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
        fs.fallocate(file, Fallocate::Allocate { keeps_size: false }, 0, 1 << 20, AT)
            .expect("room");
    }
    fs.sync().expect("a commit");
    drop(fs);
    let first = |name: &str| {
        let fs = open_read_only(&disks);
        let mut found = None;
        for_each_extent(&fs, at(&fs, name), |_, extent| {
            if let FileExtentBody::Extent { disk_bytenr, .. } = extent.body {
                found.get_or_insert(disk_bytenr);
            }
        });
        found.expect("an extent")
    };
    let before = names.map(first);
    let write = |names: &[&str]| {
        let fs = open_top(&disks);
        for name in names {
            fs.write(at(&fs, name), 0, &vec![3; 20_000], AT).expect("there is room");
        }
        fs.sync().expect("a commit");
    };
    write(&["alone"]);
    let mount = disks.mount("rw,noatime");
    let [source, target] = ["cloned", "clone"].map(|name| mount.path().join(name));
    run("cp", &["--reflink=always".as_ref(), source.as_os_str(), target.as_os_str()]);
    let snapshot = mount.path().join("snapshot");
    let words = ["subvolume".as_ref(), "snapshot".as_ref(), mount.path().as_os_str()];
    run("btrfs", &[&words[..], &[snapshot.as_os_str()]].concat());
    drop(mount);
    write(&["kept", "cloned"]);
    let after = names.map(first);
    assert_eq!(after[0], before[0], "an extent that only one file has was not written in place");
    assert!(
        after[1] != before[1] && after[2] != before[2],
        "what others have was written in place"
    );
    check(&disks);
    let mount = disks.mount("ro");
    for name in ["clone", "snapshot/kept", "snapshot/cloned"] {
        let bytes = std::fs::read(mount.path().join(name)).expect("it reads");
        assert!(bytes.iter().all(|&byte| byte == 0), "{name} changed");
    }
}

/// Regression: we cut off the space that is preallocated behind the end of a file before we knew
/// whether its extents can be moved. A refused move lost that space, and so did every other move.
#[test]
fn what_is_allocated_behind_the_end_moves_with_the_rest() {
    const EXTENTS: u64 = 1500;
    const BEHIND: u64 = 1 << 20;
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 64);
    disks.mkfs(&["-m", "single", "-n", "4k"]);
    let fs = open_top(&disks);
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    for extent in 0..EXTENTS {
        fs.write(file, extent * 8192, &[1; 4096], AT).expect("there is room");
    }
    let size = fs.attr(file).expect("attributes").size;
    let keep = Fallocate::Allocate { keeps_size: true };
    fs.fallocate(file, keep, size, BEHIND, AT).expect("there is room");
    fs.sync().expect("a commit");
    let move_by_a_sector = |moves: u64| {
        let what = if moves.is_multiple_of(2) { Fallocate::Insert } else { Fallocate::Collapse };
        fs.fallocate(file, what, 4096, 4096, AT)
    };
    let (mut made, mut moves) = (0, 0);
    let refused = loop {
        if let Err(error) = move_by_a_sector(moves) {
            break error;
        }
        moves += 1;
        assert!(moves < 10_000, "no move is refused");
        let name = format!("file{made}");
        let Ok(other) = fs.create(place(fs.root(), &name), &NEW) else { continue };
        made += 1;
        let filled = (0..20).try_for_each(|number| {
            let name = format!("user.fill{number}");
            fs.set_xattr(other, name.as_bytes(), &[1; 3000], XattrMode::Set, AT)
        });
        assert!(filled.is_ok() || moves > 2, "{filled:?}");
    };
    assert_eq!(refused.errno(), Errno::NOSPC, "{refused}");
    println!("{moves} moves, {made} files made");
    let allocated = || fs.attr(file).expect("attributes").allocated_bytes;
    assert_eq!(allocated(), EXTENTS * 4096 + BEHIND, "after a move that was refused");
    for number in 0..made {
        fs.unlink(place(fs.root(), &format!("file{number}")), AT).expect("it goes");
    }
    fs.sync().expect("a commit");
    if moves % 2 == 1 {
        move_by_a_sector(moves).expect("there is room");
    }
    fs.fallocate(file, Fallocate::Insert, 4096, 40_960, AT).expect("there is room");
    fs.fallocate(file, Fallocate::Collapse, 0, 4096, AT).expect("there is room");
    fs.sync().expect("a commit");
    assert_eq!(allocated(), (EXTENTS - 1) * 4096 + BEHIND);
    let size = fs.attr(file).expect("attributes").size / 4096;
    let all = sectors(&fs, file);
    assert_eq!(all.range(size..).count() as u64, BEHIND / 4096);
    assert_eq!(all.keys().last(), Some(&(size + BEHIND / 4096 - 1)));
    // Nothing is moved beyond the largest size of a file.
    fs.fallocate(file, keep, (1 << 63) - 8192, 8191, AT).expect("there is room");
    fs.fallocate(file, Fallocate::Insert, 4096, 4096, AT).expect("there is room");
    fs.sync().expect("a commit");
    assert_eq!(allocated(), (EXTENTS - 1) * 4096 + BEHIND + 4096);
    drop(fs);
    judge(&disks, 2);
}

/// Adjacent pieces, each written by itself and in any order, end up as one item, as in the kernel.
#[test]
fn written_pieces_of_allocated_space_become_one() {
    const PIECE: u64 = 3 * 4096;
    // Each piece comes behind another one, before another one, alone, or between two.
    const ORDER: [u64; 9] = [4, 5, 3, 0, 1, 8, 7, 6, 2];
    let Some(judges) = judges::require() else { return };
    let [theirs, ours] = [(); 2].map(|()| {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(&[]);
        disks
    });
    let len = PIECE * ORDER.len() as u64;
    let mount = theirs.mount("rw,noatime");
    let kernel = File::create_new(mount.path().join("file")).expect("a file");
    rustix::fs::fallocate(&kernel, FallocateFlags::empty(), 0, len).expect("room");
    let fs = open_top(&ours);
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    fs.fallocate(file, Fallocate::Allocate { keeps_size: false }, 0, len, AT).expect("room");
    let bytes = vec![7; usize::try_from(PIECE).expect("small")];
    for piece in ORDER {
        kernel.write_all_at(&bytes, piece * PIECE).expect("it writes");
        kernel.sync_all().expect("it is stored");
        fs.write(file, piece * PIECE, &bytes, AT).expect("the space is there");
        fs.sync().expect("a commit");
    }
    drop((kernel, mount, fs));
    for disks in [&ours, &theirs] {
        let fs = open_read_only(disks);
        let mut items = Vec::new();
        for_each_extent(&fs, at(&fs, "file"), |start, extent| {
            if let FileExtentBody::Extent { num_bytes, is_preallocated, .. } = extent.body {
                items.push((start, num_bytes, is_preallocated));
            }
        });
        assert_eq!(items, [(0, len, false)]);
    }
    judge(&ours, 1);
}
