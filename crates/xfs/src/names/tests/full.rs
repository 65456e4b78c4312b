//! Volumes without a free block: names are removed, and moved where there is room, and what needs
//! a block changes nothing.

use super::*;
use crate::file::XfsFileChanges;

/// Gives a file all blocks that files may have.
fn fill(bench: &NameBench, ino: Ino) {
    let changes = XfsFileChanges::new(&bench.engine, &bench.ids);
    let (mut at, mut piece) = (0, 1 << 14);
    while piece > 0 {
        match changes.allocate(ino, at..at + piece) {
            Ok(()) => at += piece,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                piece /= 2;
            }
        }
    }
}

fn full(mib: u64, options: &str) {
    let Some(bench) = NameBench::make(mib, options) else { return };
    let mut churn = NameChurn::new(&bench, seed_of_run());
    let names = bench.names();
    let create = |churn: &mut NameChurn<'_>, (dir, name): (Ino, &[u8]), kind: XfsNewKind<'_>| {
        let new = new_file(0o644, churn.clock);
        let made = names.create(NamePlace { dir, name }, kind, &new);
        if let Ok(ino) = made {
            churn.tree.create((dir, name), ino, TreeNode::new(kind, &new));
        }
        made
    };
    let root = (bench.root(), &b"directory"[..]);
    let dir = create(&mut churn, root, XfsNewKind::Directory).unwrap();
    for number in 0..700 {
        let name = format!("a file with the number {number}");
        let kind = if number % 50 == 0 { XfsNewKind::Directory } else { XfsNewKind::Regular };
        create(&mut churn, (dir, name.as_bytes()), kind).unwrap();
    }
    let filler = create(&mut churn, (bench.root(), b"filler"), XfsNewKind::Regular).unwrap();
    fill(&bench, filler);
    let refused = create(&mut churn, (dir, b"one more"), XfsNewKind::Regular);
    assert_eq!(refused.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(bench.tree(), churn.tree);
    let (mut moved, mut linked, mut refused) = (0, 0, 0);
    for number in (1..200).filter(|number| number % 50 != 0) {
        churn.clock += 1;
        let name = |what: &str, number: usize| format!("{what} {number}").into_bytes();
        let (from, to) = (name("a file with the number", number), name("a long new name", number));
        let [from, to] = [&from, &to].map(|name| NamePlace { dir, name });
        let done = if number % 2 == 0 {
            let done = names.rename(from, to, Rename::Replace, at(churn.clock)).map(drop);
            done.inspect(|()| churn.tree.rename(from, to, Rename::Replace, churn.clock))
                .inspect(|()| moved += 1)
        } else {
            let ino = churn.tree.nodes[&dir].names[from.name];
            let done = names.link(ino, to, at(churn.clock));
            done.inspect(|()| churn.tree.link((dir, to.name), ino, churn.clock))
                .inspect(|()| linked += 1)
        };
        if let Err(error) = done {
            assert_eq!(error.errno(), Errno::NOSPC, "{error}");
            refused += 1;
        }
    }
    let has_parents = bench.engine.geometry().layout.contains(XfsLayout::PARENTS);
    assert_eq!(moved > 0 && linked > 0, !has_parents, "{moved} {linked} {refused}");
    assert_eq!(bench.tree(), churn.tree);
    // The file that has all blocks goes last.
    let filler = churn.tree.nodes.get_mut(&bench.root()).unwrap().names.remove(&b"filler"[..]);
    churn.remove_all();
    let root = churn.tree.nodes.get_mut(&bench.root()).unwrap();
    root.names.insert(b"filler".to_vec(), filler.unwrap());
    assert_eq!(bench.tree(), churn.tree);
    churn.remove_all();
    let tree = churn.tree;
    drop(bench.assert_unmounts(&tree));
}

/// Files go to other groups when that of their directory is full.
#[test]
fn a_full_group_sends_files_to_the_next_one() {
    let Some(bench) = NameBench::make(128, "--unsupported -n parent=1") else { return };
    let (names, new) = (bench.names(), new_file(0o644, 3));
    let group = |ino: Ino| bench.engine.geometry().split_ino(ino).unwrap().0.0;
    let dirs = [b"a", b"b", b"c"].map(|name| {
        let place = NamePlace { dir: bench.root(), name };
        names.create(place, XfsNewKind::Directory, &new).unwrap()
    });
    let spare = NamePlace { dir: dirs[2], name: b"spare" };
    let ino = names.create(spare, XfsNewKind::Regular, &new).unwrap();
    XfsFileChanges::new(&bench.engine, &bench.ids).allocate(ino, 0..600).unwrap();
    // No block stays free in the other groups.
    bench.engine.counters().set_reserve(0);
    let filler = NamePlace { dir: dirs[0], name: b"filler" };
    let filler = names.create(filler, XfsNewKind::Regular, &new).unwrap();
    fill(&bench, filler);
    names.inactivate(names.unlink(spare, at(4)).unwrap().unwrap()).unwrap();
    bench.engine.log().force_all().unwrap();
    let mut groups = BTreeMap::<_, usize>::new();
    for number in 0..300 {
        let name = format!("{number}").into_bytes();
        let place = NamePlace { dir: dirs[0], name: &name };
        *groups
            .entry(group(names.create(place, XfsNewKind::Regular, &new).unwrap()))
            .or_default() += 1;
    }
    assert!(groups[&group(dirs[2])] > 100, "{groups:?}");
    let tree = bench.tree();
    drop(bench.assert_unmounts(&tree));
}

#[test]
fn names_are_removed_from_a_full_volume() {
    full(128, "--unsupported");
}

#[test]
fn names_are_removed_from_a_full_volume_with_parent_pointers() {
    full(128, "--unsupported -n parent=1");
}

#[test]
fn names_are_removed_from_a_full_volume_that_holds_nothing_back() {
    full(128, "--unsupported -m rmapbt=0,reflink=0,finobt=0,inobtcount=0");
}

/// Each group has free lists and trees of free space that may grow, and few blocks.
#[test]
fn names_are_removed_from_a_full_volume_of_64_groups_with_parent_pointers() {
    full(64 * 17, "--unsupported -d agcount=64 -n parent=1");
}
