//! Tests of the rules for engines that overwrite data, and whose names and attributes are ordered.

use offshoot_vfs::Timestamp;

use super::super::History;
use super::{allowed, allows, create, rename, write};
use crate::crash::manners::EngineManners;
use crate::crash::picture::Picture;
use crate::crash::record::history;
use crate::crash::workload::{WorkloadOp, WorkloadStep};
use crate::model::{Model, ModelManners};

const MANNERS: EngineManners = EngineManners {
    model: ModelManners::Xfs,
    is_overwriting: true,
    is_ordered: true,
    ends_with_writes: true,
};

fn of(steps: &[WorkloadStep]) -> History {
    let model = Model::made_at(Timestamp::default()).with_manners(MANNERS.model);
    history(&model, 1, steps, &[], MANNERS).expect("it can be done")
}

#[test]
fn an_fsync_covers_what_came_before_the_last_change_of_its_file() {
    let fsync = |path: &str| WorkloadStep::Fsync(path.into());
    let history = of(&[create("a"), create("b"), rename("a", "c"), fsync("b"), fsync("c")]);
    assert_eq!(allowed(&history, 0, 3), [0, 1, 2, 3]);
    assert_eq!(allowed(&history, 1, 3), [2, 3]);
    assert_eq!(allowed(&history, 2, 3), [3]);
}

#[test]
fn an_fdatasync_covers_no_times() {
    let truncate = WorkloadStep::Do(WorkloadOp::Truncate("a".into(), 10));
    let fdatasync = WorkloadStep::Fdatasync("a".into());
    let history = of(&[create("a"), write("a", 0, 10), create("b"), truncate, fdatasync]);
    // The truncation changes times alone.
    assert_eq!(allowed(&history, 1, 4), [2, 3, 4]);
}

#[test]
fn names_of_two_moments() {
    let history = of(&[create("a"), create("b"), create("c")]);
    let mut found = history.pictures[3].clone();
    found.names.retain(|_, id| *id != 2);
    found.files.remove(&2);
    assert!(!allows(&history, &found, 0, 3));
}

/// Changes the hash of a unit of 512 bytes.
fn set_unit(picture: &mut Picture, number: usize, hash: u64) {
    let sectors = picture.files.get_mut(&1).and_then(|file| file.sectors.as_mut());
    sectors.expect("data")[number] = hash;
}

#[test]
fn data_that_is_old_and_new_by_sectors_of_the_device() {
    let history = of(&[create("a"), write("a", 0, 4096), WorkloadStep::Sync, write("a", 0, 4096)]);
    let old = history.pictures[2].files[&1].sectors.clone().expect("data");
    assert_eq!(old.len(), 8);
    let mut found = history.pictures[3].clone();
    set_unit(&mut found, 5, old[5]);
    assert!(allows(&history, &found, 1, 3));
    set_unit(&mut found, 6, 7);
    assert!(!allows(&history, &found, 1, 3), "it is of another file");
}

#[test]
fn data_that_was_synced_and_is_old() {
    let write = || write("a", 0, 4096);
    let sync = WorkloadStep::Fsync("a".into());
    let history = of(&[create("a"), write(), WorkloadStep::Sync, write(), sync]);
    let old = history.pictures[2].files[&1].sectors.clone().expect("data");
    let mut found = history.pictures[3].clone();
    set_unit(&mut found, 5, old[5]);
    assert!(!allows(&history, &found, 2, 3));
}
