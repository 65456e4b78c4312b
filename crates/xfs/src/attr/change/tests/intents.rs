//! Changes of parent pointers whose intents are in a log of ours, without their ends.

use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_vfs::FileSystem;
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::attr::XattrFlags;
use offshoot_xfs_format::parent::ParentValue;
use zerocopy::IntoBytes;

use super::{AttributedVolume, BLOCKS};
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::{DeferredChain, DeferredWork};
use crate::test_volumes::engine;
use crate::trans::{XfsTransactionKind as Kind, XfsTransactions};
use crate::{XfsOptions, XfsVolume, check_xfs};

/// What an intent does to a parent pointer.
#[derive(Clone, Copy, Debug)]
enum ParentCase {
    Set,
    Remove,
    Replace,
}

/// The change that brings a file back to its one parent pointer, and the one before that.
fn changes(case: ParentCase, file: (Ino, u32), right: &OwnedXattr) -> (XattrChange, XattrChange) {
    let (right, wrong) = (
        || Some(right.clone()),
        || Some(OwnedXattr { name: b"a name that it does not have".to_vec(), ..right.clone() }),
    );
    let change = |old, new| XattrChange::of_parents(file, old, new);
    match case {
        ParentCase::Set => (change(right(), None), change(None, right())),
        ParentCase::Remove => (change(None, wrong()), change(wrong(), None)),
        ParentCase::Replace => (change(right(), wrong()), change(wrong(), right())),
    }
}

fn generation(engine: &XfsTransactions, ino: Ino) -> u32 {
    let mut t = engine.begin(Kind::ChangeAttribute, 0).unwrap();
    t.inode(ino).unwrap().core().generation.get()
}

/// A volume whose log has an intent of each kind, for files with few, some and many attributes.
/// With `is_done`, the log says what is done already.
fn with_intents(turn: usize, is_done: bool) -> Option<(AttributedVolume, XfsDisk)> {
    let mut volume = AttributedVolume::make("-n parent=1 -b size=1024", 7)?;
    let engine = engine(&volume.disk);
    let root = {
        let opened = XfsVolume::open(volume.disk.device(), &XfsOptions::default()).unwrap();
        Ino(opened.root().ino)
    };
    let parent = ParentValue::new(root, generation(&engine, root));
    let cases = [ParentCase::Set, ParentCase::Remove, ParentCase::Replace];
    let mut work = Vec::new();
    for (number, (name, many)) in
        [("plain", 1), ("directory", 12), ("many", 90)].into_iter().enumerate()
    {
        let at = volume.files.iter().position(|file| file.name == name).unwrap();
        let ino = volume.files[at].ino;
        for number in 0..many {
            let xattr = OwnedXattr {
                namespace: XattrFlags::TRUSTED,
                name: format!("{number}").into_bytes(),
                value: vec![9; 60],
            };
            let shown = format!("trusted.{number}").into_bytes();
            volume.files[at].xattrs.insert(shown, xattr.value.clone());
            volume.change(&engine, XattrChange::set(ino, xattr));
        }
        let right = OwnedXattr {
            namespace: XattrFlags::PARENT,
            name: name.as_bytes().to_vec(),
            value: parent.as_bytes().to_vec(),
        };
        let case = cases[(number + turn) % cases.len()];
        let file = (ino, generation(&engine, ino));
        let (before, back) = changes(case, file, &right);
        if !is_done {
            volume.change(&engine, before);
        }
        work.push(DeferredWork::Attribute(back));
    }
    let mut t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
    DeferredChain::new(&volume.ids).defer(&mut t, work);
    t.commit().unwrap();
    engine.log().force_all().unwrap();
    let cut = volume.disk.copy();
    Some((volume, cut))
}

fn assert_recovered_by_us(volume: &AttributedVolume, cut: &XfsDisk) {
    let by_us = cut.copy();
    let device = by_us.writable_device();
    let recovered = XfsVolume::recover(&device, &XfsOptions::default()).unwrap().unwrap();
    assert_eq!(recovered.finished_intents, 3, "{recovered:?}");
    drop(device);
    by_us.assert_checks();
    let found = check_xfs(&by_us.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
    // The recovery in memory, which a reader sees, finds the same.
    let found = check_xfs(&cut.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
    volume.assert_kernel_finds(by_us.mount("nouuid", &[]).path());
}

/// Without them the volume has wrong parent pointers. The kernel does what they say, and so do we.
#[test]
fn intents_of_ours_are_done_by_the_kernel_and_by_us() {
    for turn in 0..3 {
        let Some((volume, cut)) = with_intents(turn, false) else { return };
        let by_kernel = cut.copy();
        volume.assert_kernel_finds(by_kernel.mount("nouuid", &[RECOVERY]).path());
        by_kernel.assert_checks();
        assert_recovered_by_us(&volume, &cut);
    }
}

/// A parent pointer that is there already, or gone, is no error.
#[test]
fn intents_that_were_done_before_change_nothing() {
    let Some((volume, cut)) = with_intents(0, true) else { return };
    assert_recovered_by_us(&volume, &cut);
}
