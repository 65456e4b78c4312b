//! What readers without a lock see while a directory changes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::dir::XfsDirectory;
use crate::inode::{XfsInodes, file_id};

/// A name moves to and fro between two places of a directory in node form. Its hash is in other
/// leaves each time, so each commit publishes several blocks. A reader finds one of its names at
/// any moment, and each listing has all other names.
#[test]
fn a_renamed_entry_is_never_seen_as_none_or_two() {
    let Some(mut volume) = NamedVolume::make(1 << 10, "-b size=1024", 1, seed_of_run()) else {
        return;
    };
    let names = (0..4000).map(|number| format!("a name of the kernel {number}").into_bytes());
    volume.let_kernel_add(names.collect());
    let engine = engine(&volume.disk);
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirNode));
    volume.add(&engine, 0, b"one name");
    let (ino, file) = (volume.directories[0].ino, volume.directories[0].names[&b"one name"[..]]);
    let target = (volume.files[file].ino, volume.files[file].file_type);
    let sides: [&[u8]; 2] = [b"one name", b"the other name, which is so long that it moves"];
    let is_over = AtomicBool::new(false);
    let inodes = XfsInodes::new(1 << 20);
    let read = || {
        let (mut looks, mut lists) = (0, 0);
        while !is_over.load(Ordering::Relaxed) {
            let inode = inodes.get(engine.buffers(), file_id(ino)).unwrap();
            let directory = XfsDirectory::new(engine.buffers(), &inodes, &inode).unwrap();
            for _ in 0..100 {
                let found = directory
                    .at_one_moment(|moment| Ok([moment.find(sides[0])?, moment.find(sides[1])?]))
                    .unwrap();
                assert_eq!(found.iter().flatten().count(), 1, "{found:?}");
                looks += 1;
            }
            let mut others = 0;
            let mut visit = |entry: offshoot_vfs::DirEntry<'_>| {
                others += usize::from(!sides.contains(&entry.name));
                ControlFlow::Continue(())
            };
            directory.read(0, &mut visit).unwrap();
            assert_eq!(others, 4000);
            lists += 1;
        }
        (looks, lists)
    };
    let (looks, lists) = thread::scope(|scope| {
        let reader = scope.spawn(read);
        for step in 0..8000 {
            if reader.is_finished() {
                break;
            }
            let (from, to) = (sides[step % 2], sides[(step + 1) % 2]);
            let mut t = engine.begin(Kind::Rename, most_blocks_to_add(&engine)).unwrap();
            let mut work = remove_name(&mut t, ino, from).unwrap();
            work.extend(add_name(&mut t, ino, to, target).unwrap());
            let mut chain = DeferredChain::new(&volume.ids);
            chain.defer(&mut t, work);
            chain.finish(t, &[]).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(looks > 1000 && lists > 10, "{looks} looks, {lists} lists");
    volume.assert_unmounts(engine);
}

/// A reader that begins while a commit publishes waits for its end.
#[test]
fn there_is_no_moment_while_a_commit_publishes() {
    let Some(volume) = NamedVolume::make(1 << 10, "-b size=1024", 1, seed_of_run()) else {
        return;
    };
    let engine = engine(&volume.disk);
    let (buffers, ino) = (engine.buffers(), volume.directories[0].ino);
    let moment = buffers.moment(ino).unwrap();
    buffers.begin_publishing(ino);
    assert_eq!(buffers.moment(ino), None);
    assert!(!buffers.is_moment(ino, moment));
    buffers.end_publishing(ino);
    assert!(!buffers.is_moment(ino, moment));
    let moment = buffers.moment(ino).unwrap();
    assert!(buffers.is_moment(ino, moment));
}
