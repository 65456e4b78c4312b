//! Directories whose blocks lie about each other, each with a right checksum. A change that meets
//! such a lie fails and names the block; nothing was changed then, and other directories are
//! written on. That holds without the proof of all blocks at each commit, which debug builds have.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_xfs_format::da::DaEdit;
use offshoot_xfs_format::dir::leaf::{self, DirHash, DirLeaf};
use offshoot_xfs_format::dir::{DirCookie, free_start, leaf_start};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::{BasicBlock, FileBlock, Malformed, XfsGeometry};

use super::*;
use crate::buffer::{BufferRole, DiskRun};
use crate::test_volumes::engine_on;

/// Where a block of the first directory lies.
fn place(volume: &NamedVolume, engine: &XfsTransactions, at: FileBlock) -> BasicBlock {
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let mut directory = ChangedDirectory::new(&mut t, volume.directories[0].ino).unwrap();
    directory.blocks.expected(at).unwrap().place
}

/// The leaves of the first directory, which has a tree, in order.
fn leaves(volume: &NamedVolume, engine: &XfsTransactions) -> Vec<FileBlock> {
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let mut directory = ChangedDirectory::new(&mut t, volume.directories[0].ino).unwrap();
    let mut leaves = Vec::new();
    let mut next = Some(directory.blocks.find(0).unwrap());
    while let Some(path) = next {
        leaves.push(path.leaf);
        next = directory.blocks.next(&path, leaves[0]).unwrap();
    }
    leaves
}

/// A device with the volume, one block of which is changed and has its checksum.
fn damaged(
    volume: &NamedVolume,
    place: BasicBlock,
    change: impl FnOnce(&XfsGeometry, &mut [u8]),
) -> Arc<dyn BlockDevice> {
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over(volume.disk.device()));
    damage(&device, place, change);
    device
}

/// Changes a block of a device, which gets its checksum.
fn damage(
    device: &Arc<dyn BlockDevice>,
    place: BasicBlock,
    change: impl FnOnce(&XfsGeometry, &mut [u8]),
) {
    let geometry = engine_on(device.clone()).geometry().clone();
    let mut bytes = vec![0; geometry.dir_block_size()];
    device.read_at(place.bytes(), &mut bytes).unwrap();
    let identity = XfsIdentity::of_magic(&geometry, &bytes).unwrap();
    let lsn = identity.lsn_of(&bytes).unwrap();
    change(&geometry, &mut bytes);
    identity.seal(&mut bytes, lsn);
    device.write_at(place.bytes(), &bytes).unwrap();
}

/// Changes a leaf.
fn edit(
    (geometry, kind): (&XfsGeometry, DaKind),
    bytes: &mut [u8],
    change: impl FnOnce(&XfsGeometry, &mut DaEdit<'_>) -> Result<(), Malformed>,
) {
    change(geometry, &mut DaEdit::fill(kind, bytes)).unwrap();
}

/// The engine on a copy of a device, with and without the proof of all blocks at each commit.
fn engines(device: &Arc<dyn BlockDevice>) -> impl Iterator<Item = XfsTransactions> {
    [true, false].into_iter().map(|proves_all| {
        let engine = engine_on(Arc::new(MemoryDevice::over(device.clone())));
        engine.prove_all(proves_all);
        engine
    })
}

/// Removes a name of the first directory.
fn try_remove(volume: &NamedVolume, engine: &XfsTransactions, name: &[u8]) -> Result<()> {
    let mut t = NamedVolume::begin(engine, XfsNameChange::Remove)?;
    let work = remove_name(&mut t, volume.directories[0].ino, name)?;
    let mut chain = DeferredChain::new(&volume.ids);
    chain.defer(&mut t, work);
    chain.finish(t, &[])
}

/// The second directory is written on, and everything that was committed goes home.
fn assert_writes_on(volume: &mut NamedVolume, engine: XfsTransactions) {
    for number in 0..100 {
        volume.add(&engine, 1, format!("a name elsewhere {number}").as_bytes());
    }
    volume.directories[1].names.clear();
    engine.log().force_all().unwrap();
    engine.unmount().unwrap();
}

/// Removes the names of the first directory with each kind of engine. Returns the errors of the
/// last one.
fn remove_all(volume: &mut NamedVolume, device: &Arc<dyn BlockDevice>) -> Vec<String> {
    let mut errors = Vec::new();
    for engine in engines(device) {
        errors = remove_all_with(volume, engine);
        assert!(!errors.is_empty(), "a lie was believed");
    }
    errors
}

/// Removes the names of the first directory, all but the first in a random order. Returns the
/// errors, each of which names a block. The second directory is written on, and everything that was
/// committed goes home.
fn remove_all_with(volume: &mut NamedVolume, engine: XfsTransactions) -> Vec<String> {
    let mut names: Vec<_> = volume.directories[0].names.keys().cloned().collect();
    // The first name lies in the first block, so that its removal repairs nothing behind.
    names[1..].sort_by_cached_key(|_| volume.random.number());
    let mut errors = Vec::new();
    for name in names {
        let mut t = NamedVolume::begin(&engine, XfsNameChange::Remove).unwrap();
        match remove_name(&mut t, volume.directories[0].ino, &name) {
            Ok(work) => {
                let mut chain = DeferredChain::new(&volume.ids);
                chain.defer(&mut t, work);
                chain.finish(t, &[]).unwrap();
            }
            Err(error) => {
                assert!(error.to_string().contains("block "), "{error}");
                errors.push(error.to_string());
            }
        }
    }
    assert_writes_on(volume, engine);
    errors
}

fn with_names(names: usize) -> Option<NamedVolume> {
    let mut volume = NamedVolume::make(1 << 10, "-b size=1024", 2, seed_of_run())?;
    let name = |number: usize| format!("a name of the kernel {number}").into_bytes();
    volume.let_kernel_add((0..names).map(name).collect());
    Some(volume)
}

/// A leaf says that the last data block is empty.
#[test]
fn a_block_with_entries_is_not_trimmed() {
    let Some(mut volume) = with_names(300) else { return };
    let engine = engine(&volume.disk);
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirLeaf));
    let root = place(&volume, &engine, leaf_start(engine.geometry()));
    drop(engine);
    let device = damaged(&volume, root, |geometry, bytes| {
        let kind = DaKind::DirLeaf;
        let blocks = DirLeaf::view(geometry, kind, bytes).unwrap().bests.len();
        let longest = u16::try_from(geometry.dir_block_size() - 64).unwrap();
        edit((geometry, kind), bytes, |geometry, edit| {
            leaf::set_best(geometry, edit, blocks - 1, longest).map(drop)
        });
    });
    let errors = remove_all(&mut volume, &device);
    assert!(errors[0].contains("a leaf says that it has none"), "{}", errors[0]);
}

/// A leaf is about one data block, and the directory has several.
#[test]
fn a_directory_with_several_data_blocks_does_not_get_the_form_with_one() {
    let Some(mut volume) = with_names(300) else { return };
    let engine = engine(&volume.disk);
    let root = place(&volume, &engine, leaf_start(engine.geometry()));
    drop(engine);
    let device = damaged(&volume, root, |geometry, bytes| {
        edit((geometry, DaKind::DirLeaf), bytes, |geometry, edit| {
            leaf::truncate_bests(geometry, edit, 1)
        });
    });
    let errors = remove_all(&mut volume, &device);
    assert!(errors[0].contains("is about 1 data blocks"), "{}", errors[0]);
}

/// A directory whose entries fit in the inode has one more block in its fork.
#[test]
fn a_fork_with_blocks_does_not_go_to_the_inode() {
    let Some(mut volume) = with_names(12) else { return };
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over(volume.disk.device()));
    let engine = engine_on(device);
    let mut t = engine.begin(Kind::Link, most_blocks_to_add(&engine)).unwrap();
    let mut directory = ChangedDirectory::new(&mut t, volume.directories[0].ino).unwrap();
    assert!(directory.blocks.map(FileBlock(64), 4).unwrap() > 0);
    t.commit().unwrap();
    let names: Vec<_> = volume.directories[0].names.keys().cloned().collect();
    let remove = |name: &Vec<u8>| {
        let mut t = NamedVolume::begin(&engine, XfsNameChange::Remove).unwrap();
        let work = remove_name(&mut t, volume.directories[0].ino, name)?;
        let mut chain = DeferredChain::new(&volume.ids);
        chain.defer(&mut t, work);
        chain.finish(t, &[])
    };
    let error = names.iter().find_map(|name| remove(name).err()).unwrap();
    assert!(error.to_string().contains("more than block 0"), "{error}");
    volume.add(&engine, 1, b"a name elsewhere");
    engine.unmount().unwrap();
}

/// Leaves and nodes in wrong places: each of these lies is found before a change goes by it.
#[test]
fn neighbours_in_a_tree_are_proved() {
    let Some(mut volume) = with_names(3000) else { return };
    let engine = engine(&volume.disk);
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirNode));
    let leaves = leaves(&volume, &engine);
    assert!(leaves.len() > 4, "{leaves:?}");
    let number = |at: FileBlock| u32::try_from(at.0).unwrap();
    let [first, second, third, fourth] = [0, 1, 2, 3].map(|index| number(leaves[index]));
    let [at_second, at_third] = [1, 2].map(|index| place(&volume, &engine, leaves[index]));
    let (root, index) = (leaf_start(engine.geometry()), free_start(engine.geometry()));
    let (at_root, index) = (place(&volume, &engine, root), number(index));
    drop(engine);
    // Where it lies, the offset of the field, and what it says.
    let lies = [
        (at_second, 0, second),
        (at_second, 0, fourth),
        (at_second, 0, index),
        (at_second, 0, 7),
        (at_second, 0, 0),
        (at_third, 4, third),
        (at_third, 4, first),
        (at_third, 4, number(root)),
        (at_third, 4, 0),
        // The first entry of the root leads to another child.
        (at_root, 64 + 4, second),
        (at_root, 64 + 4, number(root)),
        (at_root, 64 + 4, 0x0100_0000),
    ];
    for (lie, (place, offset, value)) in lies.into_iter().enumerate() {
        let device = damaged(&volume, place, |_, bytes| {
            bytes[offset..offset + 4].copy_from_slice(&u32::to_be_bytes(value));
        });
        let errors = remove_all(&mut volume, &device);
        assert!(!errors.is_empty(), "lie {lie} was believed");
    }
}

/// Where the entry of a name of the first directory is.
fn cookie(volume: &NamedVolume, engine: &XfsTransactions, name: &[u8]) -> DirCookie {
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let mut directory = ChangedDirectory::new(&mut t, volume.directories[0].ino).unwrap();
    directory.search_tree(name).unwrap().found.unwrap().cookie
}

/// Adds a hash to the only leaf of the first directory.
fn with_hash(volume: &NamedVolume, root: BasicBlock, hash: DirHash) -> Arc<dyn BlockDevice> {
    damaged(volume, root, |geometry, bytes| {
        edit((geometry, DaKind::DirLeaf), bytes, |geometry, edit| {
            assert!(leaf::insert(geometry, edit, hash)?);
            Ok(())
        });
    })
}

/// A leaf has one more hash than the directory has entries, and leads with it to an entry that has
/// a hash. The removal that would bring the hashes to the only data block fails.
#[test]
fn a_block_gets_no_hash_without_an_entry() {
    let Some(mut volume) = with_names(150) else { return };
    let engine = engine(&volume.disk);
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirLeaf));
    let geometry = engine.geometry().clone();
    let root = place(&volume, &engine, leaf_start(&geometry));
    let mut names: Vec<_> = volume.directories[0].names.keys().cloned().collect();
    names.sort_by_key(|name| cookie(&volume, &engine, name).0);
    let block = |name: &[u8]| cookie(&volume, &engine, name).split(&geometry).0;
    let in_first = names.iter().filter(|name| block(name) == FileBlock(0)).count();
    assert!(in_first > 60 && in_first < 140, "{in_first}");
    let hash = DirHash::new(0x0123_4567, cookie(&volume, &engine, &names[0]));
    drop(engine);
    let device = with_hash(&volume, root, hash);
    for engine in engines(&device) {
        // The end of the first block gets room for all hashes, and the inode has none for the rest.
        let removed = &names[14..];
        let (last, others) = removed.split_last().unwrap();
        for name in others {
            try_remove(&volume, &engine, name).unwrap();
        }
        let error = try_remove(&volume, &engine, last).unwrap_err();
        assert!(error.to_string().contains("17 hashes"), "{error}");
        assert_writes_on(&mut volume, engine);
    }
}

/// A leaf leads to an entry that was removed, and lies whole in an unused piece, with what looks
/// like a short piece behind it. Neither the block nor the leaf is wrong by itself.
#[test]
fn an_old_entry_in_an_unused_piece_is_not_removed_again() {
    let Some(mut volume) = with_names(300) else { return };
    let engine = engine(&volume.disk);
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirLeaf));
    let root = place(&volume, &engine, leaf_start(engine.geometry()));
    let mut names: Vec<_> = volume.directories[0].names.keys().cloned().collect();
    names.sort_by_key(|name| cookie(&volume, &engine, name).0);
    let old = names[6].clone();
    let hash = DirHash::new(name_hash(&old), cookie(&volume, &engine, &old));
    let data = place(&volume, &engine, FileBlock(0));
    let [start, behind] =
        [6, 7].map(|index| cookie(&volume, &engine, &names[index]).split(engine.geometry()).1);
    // Those beside it go first, so that nothing is written over it.
    for name in [&names[5], &names[7], &old] {
        try_remove(&volume, &engine, name).unwrap();
    }
    engine.unmount().unwrap();
    let device = with_hash(&volume, root, hash);
    damage(&device, data, |_, bytes| {
        // Nothing ends in front of it.
        bytes[start - 2..start].fill(0);
        let [high, low] = u16::try_from(behind).unwrap().to_be_bytes();
        bytes[behind..behind + 8].copy_from_slice(&[0xff, 0xff, 0, 8, 0, 0, high, low]);
    });
    for engine in engines(&device) {
        let error = try_remove(&volume, &engine, &old).unwrap_err();
        assert!(error.to_string().contains("unused pieces"), "{error}");
        assert_writes_on(&mut volume, engine);
    }
}

/// A block that a transaction stores is proved before its commit, in release builds too. A spoiled
/// one is not published, and writing goes on.
#[test]
fn a_stored_block_is_proved_before_its_commit() {
    let Some(mut volume) = with_names(300) else { return };
    let engine = engine(&volume.disk);
    engine.prove_all(false);
    let mut t = engine.begin(Kind::Link, 0).unwrap();
    let mut directory = ChangedDirectory::new(&mut t, volume.directories[0].ino).unwrap();
    let mut bytes = directory.blocks.copy(FileBlock(0)).unwrap();
    let tag = bytes.len() - 1;
    bytes[tag] ^= 1;
    directory.blocks.store(FileBlock(0), &bytes).unwrap();
    let error = t.commit().unwrap_err();
    assert!(error.to_string().contains("at byte"), "{error}");
    volume.add(&engine, 0, b"a name here");
    volume.assert_we_find(&engine);
    volume.assert_unmounts(engine);
}

/// Two directories have the same two blocks. Two transactions that hold one each, and want the
/// other one, do not wait for each other for ever.
#[test]
fn transactions_that_share_blocks_end() {
    let Some(volume) = with_names(300) else { return };
    let engine = engine(&volume.disk);
    let [ours, theirs] = [0, 1].map(|index| volume.directories[index].ino);
    let unit = 1 << engine.geometry().dir_block_log;
    let [first, second] = [0, unit].map(|at| {
        let at = FileBlock(at);
        (place(&volume, &engine, at), at)
    });
    let bytes = engine.geometry().dir_block_size();
    let holds_both = std::sync::Barrier::new(2);
    let holds = |ino: Ino, (own, own_at): (BasicBlock, FileBlock), (other, at)| {
        let mut t = engine.begin(Kind::Link, 0).unwrap();
        t.inode(ino).unwrap();
        t.fresh(DiskRun { at: own, bytes }, BufferRole::Directory(ino, own_at)).unwrap();
        holds_both.wait();
        t.read(DiskRun { at: other, bytes }, BufferRole::Directory(ino, at)).map(drop)
    };
    let begun = Instant::now();
    let ended = thread::scope(|scope| {
        let one = scope.spawn(|| holds(ours, first, second));
        let other = scope.spawn(|| holds(theirs, second, first));
        [one.join().unwrap(), other.join().unwrap()]
    });
    assert!(begun.elapsed() < Duration::from_secs(60));
    let errors: Vec<_> = ended.into_iter().filter_map(Result::err).collect();
    assert!(errors.iter().any(|error| error.to_string().contains("block ")), "{errors:?}");
    volume.assert_unmounts(engine);
}
