//! Logs that were made or changed by hand: we do with each what the kernel does.

use std::fs;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::run::run;
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_vfs::{Code, FileSystem};
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::btree::{XfsBtreeBuilder, XfsForkRoot, XfsTree};
use offshoot_xfs_format::log::items::{
    CORE_SIZE, XfsBufferFlags, XfsBufferType, XfsEfiExtent, XfsEfiExtents, XfsFreeIntent,
    XfsInodeFields, XfsInodeItem, core_for_log, encode_buffer,
};
use offshoot_xfs_format::log::{XfsLogItem, XfsLogVector};
use offshoot_xfs_format::{BasicBlock, FileBlock, FsBlock, Ino, Lsn, csum};

use crate::crashed::make_until;
use crate::log_on_disk::LogOnDisk;

/// What the kernel and we do with a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is recovered, in memory and to disk.
    Recovered,
    /// It is recovered in memory; the kernel fails when it finishes what is pending.
    OnlyReplayed,
    /// It is refused.
    Refused,
}

/// A volume with some directories. Its log can end with each of the last 30 records.
fn crashed(judges: &XfsJudges) -> XfsDisk {
    make_until(|| {
        let disk = synced(judges);
        let ends = LogOnDisk::of(&disk).possible_ends().len();
        if ends < 30 { Err(format!("only {ends} ends of the log")) } else { Ok(disk) }
    })
}

fn synced(judges: &XfsJudges) -> XfsDisk {
    let disk = XfsDisk::create(judges, 320);
    disk.mkfs("-m rmapbt=0 -i nrext64=0");
    let mut mount = disk.mount("rw", &[]);
    for number in 0..40 {
        let dir = mount.path().join(format!("directory {number}"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("file"), format!("{number}")).unwrap();
        fs::File::open(&dir).unwrap().sync_all().unwrap();
        fs::File::open(dir.join("file")).unwrap().sync_all().unwrap();
    }
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    disk
}

/// A clean volume with a file.
fn clean(judges: &XfsJudges) -> XfsDisk {
    let disk = XfsDisk::create(judges, 320);
    disk.mkfs("-m rmapbt=0 -i nrext64=0");
    let mount = disk.mount("rw", &[]);
    fs::write(mount.path().join("file"), vec![b'f'; 20_000]).unwrap();
    drop(mount);
    disk
}

/// Holds our verdict against the kernel's, and our recoveries against its.
#[track_caller]
fn judge(disk: &XfsDisk, expected: Verdict, what: &str) {
    let by_kernel = disk.copy();
    let mounted = by_kernel.try_mount("");
    assert_eq!(mounted.is_ok(), expected == Verdict::Recovered, "{what}: {mounted:?}");
    drop(mounted);
    let by_us = disk.copy();
    let opened = XfsVolume::open(disk.device(), &XfsOptions::default());
    let recovered = XfsVolume::recover(&by_us.writable_device(), &XfsOptions::default());
    if expected == Verdict::Refused {
        let error = opened.map(drop).unwrap_err();
        assert!(matches!(error.code(), Code::Log | Code::LogNotReplayed), "{what}: {error}");
        assert!(error.to_string().contains("mount the volume once"), "{what}: {error}");
        assert!(recovered.is_err(), "{what}: {recovered:?}");
        return;
    }
    let ours = opened.unwrap_or_else(|error| panic!("{what}: {error}"));
    if expected == Verdict::OnlyReplayed {
        recovered.unwrap_err();
        return;
    }
    recovered.unwrap_or_else(|error| panic!("{what}: {error}"));
    by_us.assert_checks();
    let mount = by_us.mount("ro,noatime", &[]);
    let compare = Compare::default().without(Aspect::StoredAcls);
    compare.run(&*ours, mount.path()).assert_same(2);
    drop(mount);
    let mount = by_kernel.mount("ro,noatime", &[]);
    compare.run(&*ours, mount.path()).assert_same(2);
}

#[test]
fn records_that_were_changed_count_as_for_the_kernel() {
    use Verdict::{Recovered, Refused};
    let Some(judges) = judges::require() else { return };
    let disk = crashed(&judges);
    let records = LogOnDisk::of(&disk).records();
    let count = records.len();
    let at = |back: usize| records[count - back].lsn;
    let blocks = |back: usize| records[count - back].block_count();
    let held = |what: &str, expected: Verdict, change: &dyn Fn(&LogOnDisk)| {
        let changed = disk.copy();
        change(&LogOnDisk::of(&changed));
        judge(&changed, expected, what);
    };
    held("nothing changed", Recovered, &|_| {});
    held("a byte of the last record", Recovered, &|log| {
        log.change_block(log.ring.advance(at(1), 1), |block| block[100] ^= 1);
    });
    held("the second half of the last record", Recovered, &|log| {
        log.lose(log.ring.advance(at(1), blocks(1) / 2), blocks(1) - blocks(1) / 2);
    });
    held("the third last record", Recovered, &|log| log.lose(at(3), blocks(3)));
    held("a block of the third last record", Recovered, &|log| {
        log.lose(log.ring.advance(at(3), 1), 1);
    });
    held("another size of the log buffer in the last record", Recovered, &|log| {
        log.change_block(at(1), |block| block[320..324].copy_from_slice(&65_536_u32.to_be_bytes()));
    });
    held("a byte of the twelfth last record", Refused, &|log| {
        log.change_block(log.ring.advance(at(12), 1), |block| block[100] ^= 1);
    });
    held("no checksum", Refused, &|log| {
        log.change_block(at(12), |block| block[32..36].fill(0));
    });
    held("another volume", Refused, &|log| {
        log.change_record(at(1), |record, _| record.uuid = uuid::Uuid::from_bytes([7; 16]));
    });
    held("another byte order", Refused, &|log| {
        log.change_record(at(1), |record, _| record.byte_order = 2);
    });
    held("another record before", Recovered, &|log| {
        log.change_record(at(12), |record, _| record.previous = Some(12_345));
    });
    held("the log as the client", Recovered, &|log| {
        log.change_record(at(12), |_, body| body[8] = 0xaa);
    });
    held("an unknown client", Refused, &|log| {
        log.change_record(at(12), |_, body| body[8] = 0x11);
    });
    held("no commit op in the last record", Recovered, &|log| {
        log.change_record(at(1), |record, _| record.ops -= 1);
    });
    held("no start op", Recovered, &|log| {
        log.change_record(at(1), |_, body| body[9] = 0);
    });
    held("an unknown item", Refused, &|log| {
        log.change_record(at(12), |_, body| {
            // Behind the start op and the header: the header of the first item's op.
            assert_eq!(body[9], 1, "a start op");
            body[12 + 28 + 12 + 1] = 0x99;
        });
    });
}

#[test]
fn intents_and_their_ends() {
    let Some(judges) = judges::require() else { return };
    let disk = clean(&judges);
    let intent = |log: &LogOnDisk, has_end: bool, has_intent: bool| {
        let geometry = &log.geometry;
        // The last blocks of the first group are free.
        let start = FsBlock(u64::from(geometry.ag_blocks) - 100);
        let extents = [XfsEfiExtent { start: start.0.into(), count: 4.into(), pad: 0.into() }];
        let item = XfsFreeIntent { id: 99, extents: XfsEfiExtents::Wide(&extents) };
        let mut vector = XfsLogVector::default();
        assert!(!has_intent || XfsLogItem::Efi(item).encode(&mut vector));
        assert!(!has_end || XfsLogItem::Efd(item).encode(&mut vector));
        vector
    };
    for (has_intent, has_end, expected) in [
        (true, true, Verdict::Recovered),
        (false, true, Verdict::Recovered),
        (true, false, Verdict::OnlyReplayed),
    ] {
        let changed = disk.copy();
        let mut log = LogOnDisk::of(&changed);
        let items = intent(&log, has_end, has_intent);
        log.add(&items);
        judge(&changed, expected, &format!("intent {has_intent}, end {has_end}"));
    }
}

/// Blocks whose type is not what the log says, and blocks that are cancelled.
#[test]
fn buffers_are_written_by_type_and_lsn() {
    let Some(judges) = judges::require() else { return };
    let disk = clean(&judges);
    let log = LogOnDisk::of(&disk);
    // A free block.
    let block = u64::from(log.geometry.ag_blocks) - 100;
    let place = BasicBlock(block * 8);
    let agf_at = 512;
    let agf = log.device_bytes(agf_at, 512);
    let lsn =
        |bytes: &[u8], at: usize| Lsn(u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()));
    let old_lsn = lsn(&agf, 208);
    let item = |flags, place, bytes: &[u8], chunks: u32| {
        let mut vector = XfsLogVector::default();
        encode_buffer(flags, place, bytes, &[chunks.into()], &mut vector);
        vector
    };
    let both = |disk: &XfsDisk, what: &str, at: u64, len: usize| {
        judge(disk, Verdict::Recovered, what);
        let (by_kernel, by_us) = (disk.copy(), disk.copy());
        drop(by_kernel.try_mount("").unwrap());
        XfsVolume::recover(&by_us.writable_device(), &XfsOptions::default()).unwrap().unwrap();
        let bytes = LogOnDisk::of(&by_us).device_bytes(at, len);
        assert_eq!(bytes, LogOnDisk::of(&by_kernel).device_bytes(at, len), "{what}");
        bytes
    };
    let untyped = XfsBufferFlags::from_bits_retain(0);
    let unknown = XfsBufferFlags::from_bits_retain(31 << 11);
    let wrong = XfsBufferFlags::of(XfsBufferType::Btree);
    for flags in [untyped, unknown, wrong] {
        let changed = disk.copy();
        LogOnDisk::of(&changed).add(&item(flags, place, &[0x5a; 4096], 0b101));
        let bytes = both(&changed, &format!("{flags:?}"), place.bytes(), 4096);
        assert!(bytes[..128] == [0x5a; 128] && bytes[128..256] == [0; 128], "{flags:?}");
    }
    // An AGF with another number in its unused part, logged in front of and behind its last change.
    let mut spare = agf.clone();
    spare[100] = 0x77;
    let changed = disk.copy();
    let at = LogOnDisk::of(&changed).add(&item(
        XfsBufferFlags::of(XfsBufferType::Agf),
        BasicBlock(1),
        &spare,
        0b1,
    ));
    let bytes = both(&changed, "an AGF", agf_at, 512);
    assert_eq!((bytes[100], lsn(&bytes, 208)), (0x77, at));
    assert!(at > old_lsn && csum::is_right(&bytes, 216));
    for (is_newer, expected) in [(false, 0), (true, 0)] {
        let changed = disk.copy();
        let mut log = LogOnDisk::of(&changed);
        let mut same = agf.clone();
        let stored = if is_newer { log.ends.head.0 + 1 } else { log.ends.head.0 };
        same[208..216].copy_from_slice(&stored.to_be_bytes());
        csum::store(&mut same, 216);
        log.write_device(agf_at, &same);
        log.add(&item(XfsBufferFlags::of(XfsBufferType::Agf), BasicBlock(1), &spare, 0b1));
        let bytes = both(&changed, "an AGF of this LSN", agf_at, 512);
        assert_eq!(bytes[100], expected, "newer: {is_newer}");
    }
    // Content that looks like a block of a later log takes its change.
    let changed = disk.copy();
    let mut log = LogOnDisk::of(&changed);
    let mut content = vec![0; 4096];
    content[..4].copy_from_slice(b"BMA3");
    content[32..40].copy_from_slice(&(1_u64 << 60).to_be_bytes());
    content[40..56].copy_from_slice(log.geometry.uuid.as_bytes());
    log.write_device(place.bytes(), &content);
    log.add(&item(untyped, place, &[0x5a; 4096], 1));
    XfsVolume::recover(&changed.writable_device(), &XfsOptions::default()).unwrap().unwrap();
    assert_eq!(log.device_bytes(place.bytes(), 128), [0x5a; 128]);
    // Written, then cancelled.
    let changed = disk.copy();
    let mut log = LogOnDisk::of(&changed);
    log.add(&item(untyped, place, &[0x5a; 4096], 1));
    log.add(&item(XfsBufferFlags::CANCEL, place, &[0; 4096], 0));
    let bytes = both(&changed, "cancelled", place.bytes(), 4096);
    assert!(bytes == [0; 4096]);
    // Cancelled, then written.
    let changed = disk.copy();
    let mut log = LogOnDisk::of(&changed);
    log.add(&item(XfsBufferFlags::CANCEL, place, &[0; 4096], 0));
    log.add(&item(untyped, place, &[0x5a; 4096], 1));
    let bytes = both(&changed, "cancelled before", place.bytes(), 4096);
    assert_eq!(bytes[..128], [0x5a; 128]);
}

/// Our recovery to disk and the kernel's leave the same bytes. Returns them; `None` when both
/// refuse the log.
#[track_caller]
fn recovered_bytes(disk: &XfsDisk, what: &str, at: u64, len: usize) -> Option<Vec<u8>> {
    let (by_kernel, by_us) = (disk.copy(), disk.copy());
    let mounted = by_kernel.try_mount("");
    let recovered = XfsVolume::recover(&by_us.writable_device(), &XfsOptions::default());
    assert_eq!(mounted.is_ok(), recovered.is_ok(), "{what}: {mounted:?}, {recovered:?}");
    recovered.ok()?.expect("the log is not empty");
    drop(mounted);
    let bytes = LogOnDisk::of(&by_us).device_bytes(at, len);
    assert_eq!(bytes, LogOnDisk::of(&by_kernel).device_bytes(at, len), "{what}");
    Some(bytes)
}

const NEXT_UNLINKED: usize = 96;
const INODE_LSN: usize = 112;

/// The inode of `file` in the root directory, and where it lies, in bytes.
fn inode_of_file(disk: &XfsDisk, log: &LogOnDisk) -> (Ino, u64) {
    let ours = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
    let ino = Ino(ours.lookup(ours.root(), b"file").unwrap().ino);
    (ino, log.geometry.inode_offset(ino).unwrap())
}

/// Inodes are replayed by their LSN, and keep their place in the chain of unlinked inodes, which
/// only buffers of inodes change.
#[test]
fn inodes_are_written_by_lsn_and_keep_their_chains() {
    let Some(judges) = judges::require() else { return };
    let disk = clean(&judges);
    let log = LogOnDisk::of(&disk);
    let (ino, at) = inode_of_file(&disk, &log);
    let cluster = at / 16_384 * 16_384;
    let old = log.device_bytes(at, 512);
    let head = log.ends.head;
    let mut core: [u8; CORE_SIZE] = old[..CORE_SIZE].try_into().unwrap();
    // Its mode becomes 0600.
    core[2..4].copy_from_slice(&0o100_600_u16.to_be_bytes());
    let core = core_for_log(&core);
    let item = XfsInodeItem {
        fields: XfsInodeFields::CORE,
        ino,
        device: 0,
        place: BasicBlock(cluster / 512),
        blocks: 32,
        offset: u32::try_from(at - cluster).unwrap(),
        core: &core,
        data: None,
        attributes: None,
    };
    let mut inode_items = XfsLogVector::default();
    assert!(XfsLogItem::Inode(item).encode(&mut inode_items));
    let with = |stored: u64, next: u32, items: &XfsLogVector| {
        let changed = disk.copy();
        let mut log = LogOnDisk::of(&changed);
        let mut inode = old.clone();
        inode[INODE_LSN..INODE_LSN + 8].copy_from_slice(&stored.to_be_bytes());
        inode[NEXT_UNLINKED..NEXT_UNLINKED + 4].copy_from_slice(&next.to_be_bytes());
        csum::store(&mut inode, 100);
        log.write_device(at, &inode);
        log.add(items);
        changed
    };
    let mode = |inode: &[u8]| u16::from_be_bytes([inode[2], inode[3]]) & 0o777;
    for (stored, expected) in [(head.0 - 1, 0o600), (head.0, 0o600), (head.0 + 1, 0o644)] {
        let changed = with(stored, 130, &inode_items);
        let inode = recovered_bytes(&changed, "an inode", at, 512).unwrap();
        assert_eq!(mode(&inode), expected, "LSN {stored:x}");
        assert_eq!(inode[NEXT_UNLINKED..NEXT_UNLINKED + 4], 130_u32.to_be_bytes());
        assert!(csum::is_right(&inode, 100));
    }
    // Torn: the LSN in its first sector says nothing.
    let torn = with(head.0 + 1, 130, &inode_items);
    LogOnDisk::of(&torn).write_device(at + 104, &[0xaa]);
    let recovered = XfsVolume::recover(&torn.writable_device(), &XfsOptions::default());
    recovered.unwrap().unwrap();
    let inode = LogOnDisk::of(&torn).device_bytes(at, 512);
    assert_eq!((mode(&inode), csum::is_right(&inode, 100)), (0o600, true));
    // Its extents lead out of the volume, which only the inode itself shows.
    let mut bad = item;
    let extent = [0xff; 16];
    bad.fields = XfsInodeFields::CORE | XfsInodeFields::DATA_EXTENTS;
    bad.data = Some(&extent);
    let mut items = XfsLogVector::default();
    assert!(XfsLogItem::Inode(bad).encode(&mut items));
    let bad = with(head.0 - 1, 130, &items);
    let before = bad.copy();
    let recovered = XfsVolume::recover(&bad.writable_device(), &XfsOptions::default());
    let error = recovered.unwrap_err().to_string();
    assert!(error.contains("data fork"), "{error}");
    run("cmp", &[before.image(), bad.image()]);
    // A buffer of inodes, of which only the chains count.
    for (next, is_valid) in [(131, true), (u32::MAX, true), (u32::MAX - 5, false)] {
        let mut bytes = vec![0xee; 16_384];
        let inside = usize::try_from(at - cluster).unwrap();
        bytes[inside + NEXT_UNLINKED..][..4].copy_from_slice(&u32::to_be_bytes(next));
        let chunk = inside / 128;
        let mut map = [0_u32; 4];
        map[chunk / 32] |= 1 << (chunk % 32);
        let flags = XfsBufferFlags::of(XfsBufferType::Inodes) | XfsBufferFlags::INODES;
        let mut items = XfsLogVector::default();
        let place = BasicBlock(cluster / 512);
        encode_buffer(flags, place, &bytes, &map.map(Into::into), &mut items);
        let changed = with(head.0 - 1, u32::MAX, &items);
        let inode = recovered_bytes(&changed, "a buffer of inodes", at, 512);
        assert_eq!(inode.is_some(), is_valid, "{next:x}");
        if let Some(inode) = inode {
            assert_eq!(inode[NEXT_UNLINKED..NEXT_UNLINKED + 4], u32::to_be_bytes(next));
            assert_eq!((mode(&inode), csum::is_right(&inode, 100)), (0o644, true));
        }
    }
}

/// Version 4 has no LSNs: blocks take each change, and inodes count how often they were written.
/// The kernel here does not mount it.
#[test]
fn logs_of_version_4_are_replayed_in_memory_only() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 320);
    disk.mkfs("-m crc=0");
    let ours = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
    let root = ours.root();
    let mut log = LogOnDisk::of(&disk);
    let at = log.geometry.inode_offset(Ino(root.ino)).unwrap();
    let mut core: [u8; CORE_SIZE] = log.device_bytes(at, CORE_SIZE).try_into().unwrap();
    for (mode, flushes, expected) in [(0o40_700_u16, 5_u16, 0o700), (0o40_711, 4, 0o700)] {
        core[2..4].copy_from_slice(&mode.to_be_bytes());
        core[30..32].copy_from_slice(&flushes.to_be_bytes());
        let logged = core_for_log(&core);
        let item = XfsInodeItem {
            fields: XfsInodeFields::CORE,
            ino: Ino(root.ino),
            device: 0,
            place: BasicBlock(at / 8192 * 16),
            blocks: 16,
            offset: u32::try_from(at % 8192).unwrap(),
            core: &logged[..NEXT_UNLINKED],
            data: None,
            attributes: None,
        };
        let mut items = XfsLogVector::default();
        assert!(XfsLogItem::Inode(item).encode(&mut items));
        log.add(&items);
        let ours = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
        assert_eq!(ours.attr(root).unwrap().permissions, expected, "{flushes}");
    }
    let before = disk.copy();
    let error = XfsVolume::recover(&disk.writable_device(), &XfsOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::LogNotReplayed, "{error}");
    assert!(error.to_string().contains("version 4"), "{error}");
    run("cmp", &[before.image(), disk.image()]);
}

/// A superblock in the log turns on what we do not write: quotas.
#[test]
fn a_superblock_that_only_the_log_has_is_refused_too() {
    let Some(judges) = judges::require() else { return };
    let disk = clean(&judges);
    let mut log = LogOnDisk::of(&disk);
    let mut sector = log.device_bytes(0, 512);
    sector[177] = 0x3f;
    let mut items = XfsLogVector::default();
    let flags = XfsBufferFlags::of(XfsBufferType::Superblock);
    encode_buffer(flags, BasicBlock(0), &sector, &[0b10.into()], &mut items);
    log.add(&items);
    let before = disk.copy();
    let error = XfsVolume::recover(&disk.writable_device(), &XfsOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::LogNotReplayed, "{error}");
    assert!(error.to_string().contains("quotas"), "{error}");
    run("cmp", &[before.image(), disk.image()]);
    XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
}

/// The tree of a file gets another owner: each block once, none in the log, none that was freed.
#[test]
fn trees_that_get_another_owner_are_walked_once() {
    let Some(judges) = judges::require() else { return };
    let disk = clean(&judges);
    let log = LogOnDisk::of(&disk);
    let geometry = &log.geometry;
    let (ino, at) = inode_of_file(&disk, &log);
    let inode = log.device_bytes(at, 512);
    let mut core: [u8; CORE_SIZE] = inode[..CORE_SIZE].try_into().unwrap();
    core[5] = 3;
    core[64..72].copy_from_slice(&50_u64.to_be_bytes());
    let core = core_for_log(&core);
    let block = FsBlock(u64::from(geometry.ag_blocks) - 100);
    let place = geometry.place_of(block).unwrap();
    let leaf = |owner: Ino| {
        let mut leaf = XfsBtreeBuilder::new(geometry, XfsTree::Extents, block, owner, 0).unwrap();
        assert!(leaf.set_records(&inode[CORE_SIZE..CORE_SIZE + 16]));
        leaf.into_bytes()
    };
    let data = vec![b'd'; 4096];
    let [once, twice] = [1, 2].map(|count| vec![block; count]);
    for (what, children, is_cancelled, expected) in [
        ("one child", &once, false, Ok(leaf(ino))),
        ("one child twice", &twice, false, Err("the tree does not have it")),
        ("a block of the log", &vec![geometry.log_start], false, Err("of group")),
        ("a block that was freed", &once, true, Ok(data.clone())),
    ] {
        let root = XfsForkRoot {
            level: 1,
            children: children.iter().zip(0..).map(|(at, key)| (FileBlock(key), *at)).collect(),
        };
        let root = root.to_log(geometry, ino);
        let cluster = at / 16_384 * 16_384;
        let item = XfsInodeItem {
            fields: XfsInodeFields::CORE | XfsInodeFields::DATA_ROOT | XfsInodeFields::DATA_OWNER,
            ino,
            device: 0,
            place: BasicBlock(cluster / 512),
            blocks: 32,
            offset: u32::try_from(at - cluster).unwrap(),
            core: &core,
            data: Some(&root),
            attributes: None,
        };
        let changed = disk.copy();
        let mut log = LogOnDisk::of(&changed);
        log.write_device(place.bytes(), &if is_cancelled { data.clone() } else { leaf(Ino(999)) });
        let mut items = XfsLogVector::default();
        assert!(XfsLogItem::Inode(item).encode(&mut items));
        log.add(&items);
        if is_cancelled {
            let mut items = XfsLogVector::default();
            encode_buffer(XfsBufferFlags::CANCEL, place, &data, &[], &mut items);
            log.add(&items);
        }
        let recovered = XfsVolume::recover(&changed.writable_device(), &XfsOptions::default());
        match expected {
            Ok(expected) => {
                recovered.unwrap_or_else(|error| panic!("{what}: {error}"));
                let bytes = log.device_bytes(place.bytes(), 4096);
                // Without the LSN and the checksum.
                assert!(bytes[..32] == expected[..32] && bytes[72..] == expected[72..], "{what}");
                assert_eq!(bytes[56..64], expected[56..64], "{what}");
            }
            Err(expected) => {
                let error = recovered.unwrap_err().to_string();
                assert!(error.contains(expected), "{what}: {error}");
            }
        }
    }
}

#[test]
fn the_log_of_a_volume_on_a_short_device_is_not_replayed() {
    let Some(judges) = judges::require() else { return };
    let disk = clean(&judges);
    let mut items = XfsLogVector::default();
    encode_buffer(XfsBufferFlags::CANCEL, BasicBlock(800), &[0; 4096], &[], &mut items);
    LogOnDisk::of(&disk).add(&items);
    let image = fs::File::options().write(true).open(disk.image()).unwrap();
    image.set_len(300 << 20).unwrap();
    let options = XfsOptions::default();
    let opened = XfsVolume::open(disk.device(), &options).map(drop).unwrap_err();
    let recovered = XfsVolume::recover(&disk.writable_device(), &options).unwrap_err();
    for error in [opened, recovered] {
        assert_eq!(error.code(), Code::LogNotReplayed, "{error}");
        let text = error.to_string();
        let has = |part: u64| text.contains(&part.to_string());
        assert!(has(320 << 20) && has(300 << 20) && text.contains("log ignored"), "{text}");
    }
    let options = XfsOptions { is_log_ignored: true, ..options };
    XfsVolume::open(disk.device(), &options).unwrap();
}
