//! Power cuts at any write of a change: a reader finds the old value or the new one, and never a
//! part of one.

use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::{Errno, FileId, FileSystem};
use offshoot_xfs_format::attr::XattrFlags;

use super::{AttributedVolume, BLOCKS};
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::change_xattr;
use crate::inode::SPACE;
use crate::test_volumes::engine_on;
use crate::trans::XfsTransactionKind as Kind;
use crate::{XfsOptions, XfsVolume, check_xfs};

#[test]
fn a_cut_leaves_the_old_value_or_the_new_one() {
    let seed = seed_of_run();
    let Some(volume) = AttributedVolume::make("-b size=1024", seed) else { return };
    let ino = volume.files[0].ino;
    let xattr = |byte: u8, len: usize| OwnedXattr {
        namespace: XattrFlags::TRUSTED,
        name: b"name".to_vec(),
        value: vec![byte; len],
    };
    let values = [xattr(1, 5000), xattr(2, 9000), xattr(3, 900), xattr(4, 4000)];
    let device = Arc::new(CrashDevice::new(volume.disk.device()));
    let engine = engine_on(device.clone());
    let sets = values.iter().map(|value| XattrChange::set(ino, value.clone()));
    for change in sets.chain([XattrChange::remove(ino, xattr(0, 0))]) {
        let t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
        change_xattr(t, &volume.ids, change).unwrap();
        engine.log().force_all().unwrap();
    }
    engine.unmount().unwrap();
    let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 20, seed, tears: false };
    let (options, mut was_found) = (XfsOptions::default(), vec![false; values.len() + 1]);
    for state in device.log().states(&plan) {
        let state = state.unwrap();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let found = check_xfs(&device, &options).unwrap().findings;
        assert!(found.is_empty(), "{}: {}", state.description, found[0]);
        let opened = XfsVolume::open(device, &options).unwrap();
        let id = FileId { dev: SPACE, ino: ino.0 };
        let at = match opened.xattr(id, b"trusted.name") {
            Ok(value) => values.iter().position(|known| known.value == value),
            Err(error) => (error.errno() == Errno::NODATA).then_some(values.len()),
        };
        let at = at.unwrap_or_else(|| panic!("{}: another value", state.description));
        was_found[at] = true;
    }
    assert!(was_found.iter().all(|found| *found), "{was_found:?}");
}
