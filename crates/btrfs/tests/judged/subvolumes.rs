//! Subvolumes: their list, how they are selected, and what each shows.

use offshoot_btrfs_format::TreeId;
use offshoot_testkit::btrfs::progs;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::compare::compare;
use offshoot_testkit::run::run;
use offshoot_vfs::{Errno, FileId};

use crate::common::{TOP, at, default_filesystem, open};

/// Our list equals the one that `btrfs subvolume list` prints.
#[test]
fn the_list() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let mount = disks.mount("ro,noatime");
    let expected = progs::subvolumes(mount.path());
    assert!(expected.len() >= 8, "the filler makes more than {}", expected.len());

    let (volume, reports) = open(disks.devices()).expect("the volume opens");
    let uuid = |uuid: Option<uuid::Uuid>| uuid.map_or("-".to_owned(), |uuid| uuid.to_string());
    let mut ours: Vec<_> = volume
        .subvolumes()
        .map(|info| info.expect("a subvolume"))
        .filter(|info| info.id != TOP)
        .map(|info| progs::ListedSubvolume {
            id: info.id.0,
            parent: info.parent.expect("none is orphaned").0,
            generation: info.generation.0,
            created: info.created_generation.0,
            uuid: uuid(info.uuid),
            parent_uuid: uuid(info.parent_uuid),
            received_uuid: uuid(info.received_uuid),
            path: String::from_utf8(info.path.expect("it is read"))
                .expect("the filler uses plain names"),
            is_read_only: info.is_read_only,
        })
        .collect();
    ours.sort();
    assert_eq!(ours, expected);
    reports.assert_silent();
}

/// Every subvolume, by id and by path, shows what the kernel mounts under that name.
#[test]
fn each_by_id_and_by_path() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let list = {
        let mount = disks.mount("ro,noatime");
        progs::subvolumes(mount.path())
    };
    let (volume, reports) = open(disks.devices()).expect("the volume opens");
    let top = volume.filesystem(TOP).expect("the top level opens");
    for subvolume in list {
        let id = TreeId(subvolume.id);
        let root = FileId { dev: subvolume.id, ino: 256 };
        assert_eq!(at(&top, &subvolume.path), root, "{}", subvolume.path);
        let path = volume.subvolume(id).expect("it is there").path.expect("it is read");
        assert_eq!(path, subvolume.path.as_bytes());
        let mount = disks.mount(&format!("ro,noatime,subvolid={}", subvolume.id));
        let fs = volume.filesystem(id).expect("the subvolume opens");
        compare(&fs, mount.path()).assert_same(1);
    }
    reports.assert_silent();
}

#[test]
fn the_default_one() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let (volume, _) = open(disks.devices()).expect("the volume opens");
    assert_eq!(volume.default_subvolume().expect("a default"), TOP);

    let mount = disks.mount("rw,noatime");
    let all = progs::subvolumes(mount.path());
    let outer = all.iter().find(|one| one.path == "volumes/outer").expect("the filler makes it");
    run(
        "btrfs",
        &[
            "subvolume".as_ref(),
            "set-default".as_ref(),
            outer.id.to_string().as_ref(),
            mount.path().as_os_str(),
        ],
    );
    mount.sync();
    drop(mount);

    let mount = disks.mount("ro,noatime");
    let (volume, reports) = open(disks.devices()).expect("the volume opens");
    assert_eq!(volume.default_subvolume().expect("a default").0, outer.id);
    compare(&default_filesystem(&volume), mount.path()).assert_same(5);
    reports.assert_silent();
    drop(mount);

    let mount = disks.mount("ro,noatime,subvolid=5");
    let top = volume.filesystem(TOP).expect("the top level opens");
    compare(&top, mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
}

#[test]
fn what_is_no_subvolume_is_refused() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().make(&judges);
    let (volume, _) = open(disks.devices()).expect("the volume opens");
    for id in [2, 7, 255, 99_999] {
        let error = volume.filesystem(TreeId(id)).err().expect("no subvolume");
        assert_eq!(error.errno(), Errno::NOENT, "tree {id}: {error}");
    }
}
