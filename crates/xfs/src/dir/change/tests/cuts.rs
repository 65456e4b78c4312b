//! Power cuts at any write: a directory has the names that it had before or after one of the
//! changes, in every form, and all of it fits together.

use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};

use super::*;
use crate::test_volumes::engine_on;

#[test]
fn a_cut_leaves_the_names_of_one_moment() {
    let seed = seed_of_run();
    let Some(mut volume) = NamedVolume::make(1 << 10, "-b size=1024", 1, seed) else {
        return;
    };
    let device = Arc::new(CrashDevice::new(volume.disk.device()));
    let engine = engine_on(device.clone());
    let mut moments = vec![volume.numbers(&volume.directories[0])];
    let name = |number: usize| format!("name {number}").into_bytes();
    // Through all forms and back.
    for number in 0..560 {
        volume.add(&engine, 0, &name(number));
        moments.push(volume.numbers(&volume.directories[0]));
        if number % 40 == 0 {
            engine.log().force_all().unwrap();
        }
    }
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirNode));
    for number in 0..558 {
        volume.remove(&engine, 0, &name(number * 11 % 560));
        moments.push(volume.numbers(&volume.directories[0]));
        if number % 40 == 0 {
            engine.log().force_all().unwrap();
            engine.log().push_tail().unwrap();
        }
    }
    engine.unmount().unwrap();
    let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 6, seed, tears: false };
    let options = XfsOptions::default();
    let mut was_found = std::collections::BTreeSet::new();
    for state in device.log().states(&plan) {
        let state = state.unwrap();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let found = check_xfs(&device, &options).unwrap().findings;
        assert!(found.is_empty(), "{}: {}", state.description, found[0]);
        let opened = XfsVolume::open(device, &options).unwrap();
        let dir = FileId { dev: SPACE, ino: volume.directories[0].ino.0 };
        let mut names = BTreeMap::new();
        let mut visit = |entry: offshoot_vfs::DirEntry<'_>| {
            names.insert(entry.name.to_vec(), entry.file.ino);
            ControlFlow::Continue(())
        };
        opened.read_dir(dir, 0, &mut visit).unwrap();
        let moment = moments.iter().position(|moment| *moment == names);
        let moment = moment.unwrap_or_else(|| panic!("{}: other names", state.description));
        was_found.insert(moment);
    }
    assert!(was_found.len() > 10, "{was_found:?}");
}
