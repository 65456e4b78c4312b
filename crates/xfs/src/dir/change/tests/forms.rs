//! Forms of directories that a random test seldom meets.

use offshoot_testkit::random::seed_of_run;
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::hash::name_hash;

use super::*;

/// Adds these names in random order, and removes them again in another. Returns the volume with the
/// form at the most, and the index blocks then.
fn grow_and_shrink(options: &str, names: &[Vec<u8>]) -> Option<(DaKind, usize)> {
    let mut volume = NamedVolume::make(1 << 10, options, 1, seed_of_run())?;
    let engine = engine(&volume.disk);
    let mut order: Vec<_> = names.iter().collect();
    order.sort_by_cached_key(|_| volume.random.number());
    for name in &order {
        volume.add(&engine, 0, name);
    }
    let most = (volume.form(&engine, 0).unwrap(), index_blocks(&volume, &engine));
    volume.assert_cut_recovers(&engine);
    volume.assert_we_find(&engine);
    order.sort_by_cached_key(|_| volume.random.number());
    let rest = order.split_off(order.len() * 19 / 20);
    for name in order {
        volume.remove(&engine, 0, name);
    }
    volume.assert_cut_recovers(&engine);
    for name in rest {
        volume.remove(&engine, 0, name);
    }
    assert_eq!(volume.form(&engine, 0), None);
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    assert!(is_empty(&mut t, volume.directories[0].ino).unwrap());
    let core = t.inode(volume.directories[0].ino).unwrap().core();
    assert_eq!((core.size.get(), core.nblocks.get(), core.extent_counts().0), (6, 0, 0));
    drop(t);
    volume.assert_unmounts(engine);
    Some(most)
}

/// The index blocks of the first directory that say something.
fn index_blocks(volume: &NamedVolume, engine: &XfsTransactions) -> usize {
    let geometry = engine.geometry();
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let mut directory = ChangedDirectory::new(&mut t, volume.directories[0].ino).unwrap();
    let start = offshoot_xfs_format::dir::free_start(geometry).0;
    let unit = u64::from(directory.blocks.unit());
    let mut at = |index: u64| directory.blocks.find_held(FileBlock(start + index * unit));
    (0..100).filter(|index| at(*index).unwrap().is_some()).count()
}

/// Names fill an index block of 2,016 data blocks, with 14 of them in each, and a part of another.
#[test]
fn a_directory_gets_several_index_blocks_and_loses_them() {
    let name = |number: usize| format!("{number:0255}").into_bytes();
    let Some(mut volume) = NamedVolume::make(1 << 10, "", 1, seed_of_run()) else { return };
    volume.let_kernel_add((0..28_000).map(name).collect());
    let engine = engine(&volume.disk);
    assert_eq!(index_blocks(&volume, &engine), 1);
    for number in 28_000..28_700 {
        volume.add(&engine, 0, &name(number));
    }
    assert_eq!(index_blocks(&volume, &engine), 2);
    // Most data blocks of the first one go.
    for number in (100..27_000).step_by(2).chain((101..27_000).step_by(2)) {
        volume.remove_quickly(&engine, &name(number));
    }
    assert_eq!(index_blocks(&volume, &engine), 2);
    for number in 40_000..41_000 {
        volume.add(&engine, 0, &name(number));
    }
    volume.assert_we_find(&engine);
    for number in 27_000..28_700 {
        volume.remove_quickly(&engine, &name(number));
    }
    assert_eq!(index_blocks(&volume, &engine), 1);
    volume.assert_cut_recovers(&engine);
    for number in (0..100).chain(40_000..41_000) {
        volume.remove_quickly(&engine, &name(number));
    }
    assert_eq!(volume.form(&engine, 0), None);
    volume.assert_unmounts(engine);
}

#[test]
fn a_directory_gets_a_tree_and_loses_it() {
    let name = |number: usize| format!("the name {number}").into_bytes();
    let names: Vec<_> = (0..5000).map(name).collect();
    let Some((kind, _)) = grow_and_shrink("-b size=1024", &names) else { return };
    assert_eq!(kind, DaKind::DirNode);
}

/// Names with one hash fill many leaves.
#[test]
fn names_with_one_hash_are_told_apart() {
    let name = |number: u32| -> Vec<u8> {
        // One more in the third byte of a word is as much as the high bit of the fourth.
        let pair = |bit: u32| if number >> bit & 1 == 0 { *b"ab\x62\x41" } else { *b"ab\x63\xc1" };
        (0..11).flat_map(pair).collect()
    };
    let mut names: Vec<_> = (0..1200).map(name).collect();
    assert!(names.iter().all(|name| name_hash(name) == name_hash(&names[0])));
    names.extend((0..200).map(|number: u32| format!("another {number}").into_bytes()));
    let Some((kind, _)) = grow_and_shrink("", &names) else { return };
    assert_eq!(kind, DaKind::DirNode);
}

/// The numbers of inodes behind 2 TiB have more than 32 bits. A directory in short form widens with
/// the first of them, and narrows with the last.
#[test]
fn a_short_directory_widens_and_narrows() {
    let Some(mut volume) = NamedVolume::make(4 << 20, "-l size=64m", 4, seed_of_run()) else {
        return;
    };
    let engine = engine(&volume.disk);
    let is_wide = |ino: Ino| ino.0 >> 32 != 0;
    let wide = volume.directories.iter().position(|directory| is_wide(directory.ino)).unwrap();
    let narrow = volume.directories.iter().position(|directory| !is_wide(directory.ino)).unwrap();
    let [above, below] = [wide, narrow].map(|index| volume.directories[index].ino);
    let size = |engine: &XfsTransactions, ino| {
        let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
        t.inode(ino).unwrap().core().size.get()
    };
    // Names of directories only: other files are where `files` is.
    let link = |engine: &XfsTransactions, dir: Ino, name: &[u8], target: XfsEntryTarget| {
        let mut t = engine.begin(Kind::Link, most_blocks_to_add(engine)).unwrap();
        let work = add_name(&mut t, dir, name, target).unwrap();
        assert_eq!(work.len(), 0);
        // Dropped again.
        t.inode(dir).unwrap().core().size.get()
    };
    assert_eq!(size(&engine, below), 6);
    assert_eq!(link(&engine, below, b"a", (below, file_type::DIR)), 6 + 9);
    assert_eq!(link(&engine, below, b"a", (above, file_type::DIR)), 10 + 13);
    // The directory above one that is wide is the root, which is not.
    assert_eq!(size(&engine, above), 6);
    for step in 0..60 {
        let name = format!("name {}", step % 9).into_bytes();
        for index in [wide, narrow] {
            let is_there = volume.directories[index].names.contains_key(&name);
            let file = volume.below(volume.files.len());
            let change = match is_there {
                true if step % 3 == 0 => XfsNameChange::Replace(file),
                true => XfsNameChange::Remove,
                false => XfsNameChange::Add(file),
            };
            volume.try_change(&engine, index, &name, change).unwrap();
        }
    }
    volume.assert_we_find(&engine);
    volume.assert_cut_recovers(&engine);
    volume.remove_all(&engine, narrow);
    assert_eq!(size(&engine, below), 6);
    move_directory(&mut volume, &engine, narrow, wide);
    assert_eq!(size(&engine, below), 10);
    engine.unmount().unwrap();
    volume.disk.assert_checks();
    let found = check_xfs(&volume.disk.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
}

/// Moves a directory of the root into another one.
fn move_directory(volume: &mut NamedVolume, engine: &XfsTransactions, moved: usize, to: usize) {
    let root = {
        let opened = XfsVolume::open(volume.disk.device(), &XfsOptions::default()).unwrap();
        Ino(opened.root().ino)
    };
    let name = volume.directories[moved].path.clone().into_bytes();
    let [from, into] = [moved, to].map(|index| volume.directories[index].ino);
    let mut t = engine.begin(Kind::Rename, 2 * most_blocks_to_add(engine)).unwrap();
    let mut work = remove_name(&mut t, root, &name).unwrap();
    work.extend(add_name(&mut t, into, b"moved", (from, file_type::DIR)).unwrap());
    work.extend(set_parent(&mut t, from, into).unwrap());
    for (ino, links) in [(root, -1), (into, 1)] {
        let core = t.inode(ino).unwrap().core_mut();
        core.nlink = core.nlink.get().checked_add_signed(links).unwrap().into();
    }
    assert_eq!(find_name(&mut t, from, b"..").unwrap(), Some((into, file_type::DIR)));
    assert_eq!(find_name(&mut t, from, b".").unwrap(), Some((from, file_type::DIR)));
    let mut chain = DeferredChain::new(&volume.ids);
    chain.defer(&mut t, work);
    chain.finish(t, &[]).unwrap();
    volume.directories[moved].path = format!("{}/moved", volume.directories[to].path);
}

/// A moved directory says in every form where it is now.
#[test]
fn a_directory_of_any_form_is_moved() {
    let Some(mut volume) = NamedVolume::make(1 << 10, "-b size=1024", 5, seed_of_run()) else {
        return;
    };
    let engine = engine(&volume.disk);
    for (index, count) in [0, 60, 300, 2000].into_iter().enumerate() {
        for number in 0..count {
            volume.add(&engine, index, format!("name {number}").as_bytes());
        }
    }
    let forms = [0, 1, 2, 3].map(|index| volume.form(&engine, index));
    let kinds = [DaKind::DirBlock, DaKind::DirLeaf, DaKind::DirNode].map(Some);
    assert_eq!((forms[0], &forms[1..]), (None, &kinds[..]));
    // Each into the next, and the last into the fifth.
    for index in 0..4 {
        move_directory(&mut volume, &engine, index, index + 1);
    }
    // One file is in the model of none.
    let mut path = volume.directories[4].path.clone();
    for index in (0..4).rev() {
        path = format!("{path}/moved");
        volume.directories[index].path.clone_from(&path);
    }
    engine.log().force_all().unwrap();
    let cut = volume.disk.copy();
    drop(cut.mount("nouuid", &[RECOVERY]));
    cut.assert_checks();
    engine.unmount().unwrap();
    volume.disk.assert_checks();
    let found = check_xfs(&volume.disk.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
}

/// What no name can be is refused, and so is what is there already, or not there.
#[test]
fn wrong_changes_are_refused() {
    let Some(mut volume) = NamedVolume::make(1 << 10, "-b size=1024", 1, seed_of_run()) else {
        return;
    };
    let engine = engine(&volume.disk);
    let (dir, file) = (volume.directories[0].ino, volume.files[3].ino);
    let target = (file, file_type::REG_FILE);
    let mut added = 0;
    for forms in [None, Some(DaKind::DirBlock), Some(DaKind::DirLeaf), Some(DaKind::DirNode)] {
        while volume.form(&engine, 0) != forms {
            volume.add(&engine, 0, format!("name {added}").as_bytes());
            added += 1;
        }
        if added == 0 {
            volume.add(&engine, 0, b"name 0");
            added += 1;
        }
        let mut t = engine.begin(Kind::Rename, most_blocks_to_add(&engine)).unwrap();
        let errno = |outcome: Result<Vec<DeferredWork>>| outcome.unwrap_err().errno();
        assert_eq!(errno(add_name(&mut t, dir, b"name 0", target)), Errno::EXIST);
        assert_eq!(errno(remove_name(&mut t, dir, b"no name")), Errno::NOENT);
        assert_eq!(errno(replace_name(&mut t, dir, b"no name", target)), Errno::NOENT);
        assert_eq!(errno(add_name(&mut t, file, b"name", target)), Errno::NOTDIR);
        assert_eq!(errno(add_name(&mut t, dir, &[b'a'; 256], target)), Errno::NAMETOOLONG);
        for name in [&b"."[..], b"..", b"", b"a/b", b"a\0b"] {
            assert_eq!(errno(add_name(&mut t, dir, name, target)), Errno::INVAL);
            assert_eq!(errno(remove_name(&mut t, dir, name)), Errno::INVAL);
        }
        assert!(t.commit().unwrap().is_none(), "a refused change has changed something");
    }
    volume.assert_unmounts(engine);
}

/// A directory of ours, in an inode that had a file.
#[test]
fn a_new_directory_is_empty() {
    let Some(volume) = NamedVolume::make(1 << 10, "", 1, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let (dir, ino) = (volume.directories[0].ino, volume.files[3].ino);
    let mut t = engine.begin(Kind::Mkdir, most_blocks_to_add(&engine)).unwrap();
    let core = t.inode(ino).unwrap().core_mut();
    core.mode = 0o040_755.into();
    core.nlink = 2.into();
    make_empty(&mut t, ino, dir).unwrap();
    assert!(is_empty(&mut t, ino).unwrap());
    assert!(is_empty(&mut t, dir).unwrap());
    add_name(&mut t, dir, b"new", (ino, file_type::DIR)).unwrap();
    let core = t.inode(dir).unwrap().core_mut();
    core.nlink = 3.into();
    assert!(!is_empty(&mut t, dir).unwrap());
    // Its old name is gone.
    let files = {
        let opened = XfsVolume::open(volume.disk.device(), &XfsOptions::default()).unwrap();
        Ino(opened.lookup(opened.root(), FILES.as_bytes()).unwrap().ino)
    };
    remove_name(&mut t, files, b"file 3").unwrap();
    t.commit().unwrap();
    engine.unmount().unwrap();
    volume.disk.assert_checks();
    let found = check_xfs(&volume.disk.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
    let mount = volume.disk.mount("", &[]);
    std::fs::remove_dir(mount.path().join(&volume.directories[0].path).join("new")).unwrap();
}
