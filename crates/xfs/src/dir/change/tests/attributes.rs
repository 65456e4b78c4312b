//! A directory in its inode, and attributes that want the same room.

use std::fs::File;

use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::Code;
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::attr::XattrFlags;

use super::super::move_to_block;
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::{DeferredChain, IntentIds, change_xattr};
use crate::test_volumes::engine;
use crate::trans::XfsTransactionKind as Kind;

/// Twenty names take 306 of the 336 bytes of an inode that never had attributes, which need 36.
#[test]
fn a_directory_that_fills_its_inode_makes_way_for_attributes() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 300);
    disk.mkfs("");
    let mount = disk.mount("", &[]);
    let root = Ino(XfsDisk::ino(mount.path()));
    let names: Vec<_> = (0..20).map(|number| format!("name {number:02}")).collect();
    for name in &names {
        File::create(mount.path().join(name)).unwrap();
    }
    drop(mount);
    let (engine, ids) = (engine(&disk), IntentIds::default());
    let (namespace, name) = (XattrFlags::TRUSTED, b"name".to_vec());
    let change = XattrChange::set(root, OwnedXattr { namespace, name, value: b"value".to_vec() });
    let mut t = engine.begin(Kind::ChangeAttribute, 200).unwrap();
    assert!(change.is_kept_out_by_data(&mut t).unwrap());
    assert_eq!(change_xattr(t, &ids, change.clone()).unwrap_err().code(), Code::Unsupported);
    let mut t = engine.begin(Kind::AddAttributeFork, 10).unwrap();
    let work = move_to_block(&mut t, root).unwrap();
    let mut chain = DeferredChain::new(&ids);
    chain.defer(&mut t, work);
    chain.finish(t, &[]).unwrap();
    let mut t = engine.begin(Kind::ChangeAttribute, 200).unwrap();
    assert!(!change.is_kept_out_by_data(&mut t).unwrap());
    change_xattr(t, &ids, change).unwrap();
    engine.log().force_all().unwrap();
    let cut = disk.copy();
    engine.unmount().unwrap();
    for (disk, says) in [(&cut, &[RECOVERY][..]), (&disk, &[])] {
        let mount = disk.mount("nouuid", says);
        let found = std::fs::read_dir(mount.path()).unwrap();
        let mut found: Vec<_> =
            found.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        found.sort();
        assert_eq!(found, names);
        let mut value = [0; 8];
        let len = rustix::fs::getxattr(mount.path(), "trusted.name", &mut value[..]).unwrap();
        assert_eq!(value[..len], *b"value");
        drop(mount);
        disk.assert_checks();
    }
}
