//! Volumes that the kernel filled become smaller, and larger again.

use offshoot_btrfs::Engine;
use offshoot_btrfs_format::DeviceId;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;

use crate::common::{MIB, assert_kernel_writes, assert_same, len_of, open, with_snapshots};

/// Shrinks the first member of a volume of the kernel to `to` MiB, and lets it grow again.
#[track_caller]
fn shrinks(devices: usize, mib: u64, mkfs: &'static str, to: u64) {
    let Some(judges) = judges::require() else { return };
    let disks =
        Recipe::new().devices(devices).mib(mib).mkfs(mkfs).fill(with_snapshots).make(&judges);
    let ours = disks.copy(&judges);
    let shown = {
        let fs = open(&ours);
        let resized = fs.volume().resize(DeviceId(1), to * MIB).expect("it shrinks");
        assert_eq!((resized.before, resized.after), (mib * MIB, to * MIB));
        fs.volume().members()[0].total_bytes()
    };
    assert_eq!(shown, to * MIB);
    assert_eq!(len_of(&ours.images()[0]), to * MIB, "the image is cut off");
    assert_same(&disks, &ours);
    let larger = to + 300;
    {
        let fs = open(&ours);
        fs.volume().resize(DeviceId(1), larger * MIB).expect("it grows");
    }
    assert_eq!(len_of(&ours.images()[0]), larger * MIB, "the image is longer");
    assert_same(&disks, &ours);
    assert_kernel_writes(&ours, 100);
}

#[test]
fn one_member_shrinks() {
    shrinks(1, 2048, "-m dup -d single", 600);
    // The chunks that stay must become shorter.
    shrinks(1, 2048, "-m dup -d single", 260);
}

/// Generations, UUIDs and all else that is known of each subvolume.
fn shown_subvolumes(volume: &Engine) -> Vec<String> {
    volume.subvolumes().map(|info| format!("{:?}", info.expect("a subvolume"))).collect()
}

/// Moves everything of a volume of the kernel out of each block group that it has.
#[track_caller]
fn moves_everything(devices: usize, mkfs: &'static str) {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().devices(devices).mib(1024).mkfs(mkfs).fill(with_snapshots);
    let disks = recipe.make(&judges);
    let ours = disks.copy(&judges);
    {
        let fs = open(&ours);
        let volume = fs.volume();
        let subvolumes = shown_subvolumes(volume);
        assert!(subvolumes.iter().any(|shown| shown.contains("received_uuid: Some")));
        let chunks: Vec<_> = volume.chunks().collect();
        for chunk in &chunks {
            volume
                .relocate(chunk.start)
                .unwrap_or_else(|error| panic!("{mkfs}, {chunk:?}: {error}"));
        }
        let left =
            volume.chunks().filter(|chunk| chunks.iter().any(|one| one.start == chunk.start));
        assert_eq!(left.count(), 0, "{mkfs}");
        assert_eq!(shown_subvolumes(volume), subvolumes, "{mkfs}");
    }
    assert_same(&disks, &ours);
    assert_kernel_writes(&ours, 20);
}

#[test]
fn everything_of_one_member_moves() {
    moves_everything(1, "-m dup -d single");
    moves_everything(1, "--mixed");
    moves_everything(1, "-m single -d single -n 4096 -O ^no-holes,^block-group-tree");
    moves_everything(1, "-m single -d dup -n 65536 -O quota,block-group-tree --csum sha256");
    moves_everything(1, "-O squota");
}

#[test]
fn everything_of_several_members_moves() {
    moves_everything(2, "-m raid1 -d raid0");
    moves_everything(4, "-m raid10 -d raid10");
    moves_everything(3, "-m raid1c3 -d raid1");
}

/// Makes a volume of the kernel as small as it can be. The kernel writes it as it is, and when it
/// is larger again.
#[track_caller]
fn is_minimal(mkfs: &'static str, most: u64) {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(1500).mkfs(mkfs).fill(with_snapshots).make(&judges);
    let ours = disks.copy(&judges);
    let resized = {
        let fs = open(&ours);
        fs.volume().resize_to_minimum(DeviceId(1), 0).expect("it shrinks")
    };
    let len = len_of(&ours.images()[0]);
    println!("{mkfs}: {} MiB and {} bytes", len / MIB, len % MIB);
    assert_eq!(len, resized.after);
    assert!(len < most * MIB, "{mkfs}: {len}");
    assert_same(&disks, &ours);
    {
        let mount = ours.mount("rw,noatime");
        std::fs::write(mount.path().join("of the kernel"), b"a few bytes")
            .expect("room for a file");
        mount.sync();
        std::fs::remove_file(mount.path().join("of the kernel")).expect("it goes");
    }
    ours.assert_checks();
    {
        let fs = open(&ours);
        fs.volume().resize(DeviceId(1), len + 300 * MIB).expect("it grows");
    }
    assert_kernel_writes(&ours, 100);
}

#[test]
fn a_volume_of_the_kernel_becomes_minimal() {
    is_minimal("-m dup -d single", 200);
    is_minimal("-m single -d single -n 4096", 200);
}
