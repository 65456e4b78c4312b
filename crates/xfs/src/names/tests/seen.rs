//! What readers without a lock see while names and attributes change.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use offshoot_xfs_format::attr::XattrFlags;

use super::*;
use crate::attr::FileXattrs;
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::change_xattr;
use crate::dir::{DirectoryChildren, XfsDirectory};
use crate::inode::XfsInodes;
use crate::trans::XfsTransactionKind as Kind;

fn made(bench: &NameBench, name: &[u8], kind: XfsNewKind<'_>) -> Ino {
    let place = NamePlace { dir: bench.root(), name };
    bench.names().create(place, kind, &new_file(0o700, 1)).unwrap()
}

#[test]
fn the_name_of_a_directory_is_that_of_its_last_move() {
    let Some(bench) = NameBench::make(1 << 10, "") else { return };
    let root = bench.root();
    let dir = made(&bench, b"first", XfsNewKind::Directory);
    let (inodes, children) = (XfsInodes::new(1 << 20), DirectoryChildren::new(1 << 20));
    let buffers = bench.engine.buffers();
    let name = || {
        let inode = inodes.get(buffers, file_id(root)).unwrap();
        let above = XfsDirectory::new(buffers, &inodes, &inode).unwrap();
        children.name_of(&above, dir)
    };
    assert_eq!(name().unwrap(), b"first");
    let place = |name| NamePlace { dir: root, name };
    bench.names().rename(place(b"first"), place(b"second"), Rename::Replace, at(2)).unwrap();
    assert_eq!(name().unwrap(), b"second");
    bench.names().rmdir(place(b"second"), at(3)).unwrap();
    name().unwrap_err();
}

/// The values are in the inode, in a leaf, or in blocks, so each change moves them.
#[test]
fn an_attribute_has_one_of_its_values_while_it_changes() {
    let Some(bench) = NameBench::make(1 << 10, "-b size=1024") else { return };
    let ino = made(&bench, b"file", XfsNewKind::Regular);
    let set = |name: &str, value: &[u8]| {
        let namespace = XattrFlags::TRUSTED;
        let name = name.as_bytes().to_vec();
        let xattr = OwnedXattr { namespace, name, value: value.to_vec() };
        let t = bench.engine.begin(Kind::ChangeAttribute, 200).unwrap();
        change_xattr(t, &bench.ids, XattrChange::set(ino, xattr)).unwrap();
    };
    let values: Vec<_> = [5, 3000, 400, 9000]
        .into_iter()
        .enumerate()
        .map(|(number, len)| vec![u8::try_from(number).unwrap(); len])
        .collect();
    (0..60).for_each(|number| set(&format!("other {number}"), &[7; 50]));
    set("name", &values[0]);
    let (is_over, looks) = (AtomicBool::new(false), AtomicUsize::new(0));
    let inodes = XfsInodes::new(1 << 20);
    let read = || {
        let mut seen = std::collections::BTreeSet::new();
        while !is_over.load(Ordering::Relaxed) {
            let xattrs = FileXattrs::new(bench.engine.buffers(), &inodes, file_id(ino));
            let value = xattrs.get(b"trusted.name").unwrap();
            assert!(values.contains(&value));
            seen.insert(value);
            let mut listed = Vec::new();
            let mut visit = |name: &[u8], _: &[u8]| {
                listed.push(name.to_vec());
                ControlFlow::Continue(())
            };
            xattrs.list(&mut visit).unwrap();
            listed.sort_unstable();
            listed.dedup();
            assert_eq!(listed.len(), 61);
            looks.fetch_add(1, Ordering::Relaxed);
        }
        seen.len()
    };
    let seen = thread::scope(|scope| {
        let reader = scope.spawn(read);
        // On a busy machine the reader gets few turns, so the values change until it had enough.
        for number in 0..100_000 {
            if reader.is_finished() || number >= 600 && looks.load(Ordering::Relaxed) > 20 {
                break;
            }
            set("name", &values[number % values.len()]);
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    let looks = looks.into_inner();
    assert!(looks > 20 && seen > 1, "{looks} looks, {seen} values");
    let tree = bench.tree();
    drop(bench.assert_unmounts(&tree));
}

/// Commits come one after the other, and a reader is slow.
#[test]
fn a_slow_reader_makes_commits_wait() {
    let Some(bench) = NameBench::make(1 << 10, "") else { return };
    let (root, names) = (bench.root(), bench.names());
    let is_over = AtomicBool::new(false);
    let inodes = XfsInodes::new(1 << 20);
    thread::scope(|scope| {
        scope.spawn(|| {
            for step in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let place = NamePlace { dir: root, name: b"name" };
                names.create(place, XfsNewKind::Regular, &new_file(0, step)).unwrap();
                let lost = names.unlink(place, at(step)).unwrap();
                names.inactivate(lost.unwrap()).unwrap();
            }
        });
        let mut tries = 0;
        let found = inodes.at_one_moment(bench.engine.buffers(), file_id(root), |inode| {
            tries += 1;
            thread::sleep(Duration::from_millis(20));
            Ok(inode.core.changecount.get())
        });
        is_over.store(true, Ordering::Relaxed);
        found.unwrap();
        assert!((2..20).contains(&tries), "{tries}");
    });
}
