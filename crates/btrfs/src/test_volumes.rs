//! What unit tests that write volumes share.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::encode::seal_block;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_device::{BlockDevice, FileDevice, MemoryDevice};
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;
use offshoot_vfs::Timestamp;
use uuid::Uuid;

use crate::shown::show;
use crate::tree::{Blocks, ItemEdit, TreeRoot};
use crate::{BtrfsVolume, EngineOptions, MkfsOptions, mkfs};

/// The size of a volume that has far more room than there is memory.
const ROOM_BYTES: u64 = 32 << 30;

/// Opens the volume for writing.
pub(crate) fn open(disks: &Disks) -> Arc<BtrfsVolume> {
    let open = |image| FileDevice::open_writable(image).expect("nobody else uses the image");
    let devices = disks.images().iter().map(|image| Arc::new(open(image)) as Arc<_>).collect();
    BtrfsVolume::open_writable(devices, &EngineOptions::default()).expect("the volume opens")
}

/// A new volume in memory, with nodes of this size and far more room than there is memory, and its
/// device. It is checked when the device is dropped.
pub(crate) fn in_memory(node_size: u32) -> Arc<CheckedDevice> {
    in_memory_of(node_size, ROOM_BYTES)
}

/// A new volume in memory of this many bytes, and its device. It is checked when the device is
/// dropped.
pub(crate) fn in_memory_of(node_size: u32, size_bytes: u64) -> Arc<CheckedDevice> {
    let device = Arc::new(CheckedDevice::sparse(size_bytes, |device| {
        show(std::slice::from_ref(device)).expect("it opens")
    }));
    make(device.clone(), node_size);
    device
}

/// The same as [`in_memory`] for who puts items of no meaning into a tree, of which `btrfs check`
/// cannot make anything: nobody checks it.
pub(crate) fn bare(node_size: u32) -> Arc<MemoryDevice> {
    bare_of(node_size, ROOM_BYTES)
}

/// The same of this many bytes.
pub(crate) fn bare_of(node_size: u32, size_bytes: u64) -> Arc<MemoryDevice> {
    let device = Arc::new(MemoryDevice::sparse(size_bytes));
    make(device.clone(), node_size);
    device
}

fn make(device: Arc<dyn BlockDevice>, node_size: u32) {
    let mut options = MkfsOptions::new(Uuid::from_u128(7), Timestamp::default());
    options.node_size = Some(node_size);
    mkfs(&[device], &options).expect("a volume");
}

/// Changes all copies of the root block of a tree on the device of a volume. Its checksum then fits
/// no more, and nobody checks the volume.
pub(crate) fn edit_root(
    device: &CheckedDevice,
    volume: &BtrfsVolume,
    root: TreeRoot,
    edit: impl FnOnce(&mut [u8]),
) {
    device.leave_unchecked("a block is damaged");
    let mut bytes = volume.block(&root.expected()).unwrap().bytes().to_vec();
    edit(&mut bytes);
    for (_, physical, part) in
        volume.storage.write_places(root.logical, bytes.len() as u64).unwrap()
    {
        let part = usize::try_from(part.start).unwrap()..usize::try_from(part.end).unwrap();
        device.write_at(physical.0, &bytes[part]).unwrap();
    }
}

/// Changes the bytes of the leaf that has an item on all members, given the slot of the item, and
/// gives it a fitting checksum. No writer would leave it so.
pub(crate) fn patch_leaf(
    disks: &Disks,
    tree: TreeId,
    key: Key,
    change: impl FnOnce(&mut [u8], usize),
) {
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
    let root = match tree {
        TreeId::CHUNK => crate::transaction::chunk_tree_root(&volume),
        tree => volume.tree(tree).unwrap(),
    };
    let mut cursor = volume.cursor(root, key).unwrap();
    let (leaf, slots) = cursor.take_run(key).unwrap().expect("the item is there");
    let mut bytes = leaf.bytes().to_vec();
    change(&mut bytes, slots.start);
    seal_block(&mut bytes, volume.superblock().checksum);
    let (at, len) = (Logical(leaf.header().bytenr.get()), bytes.len() as u64);
    for (member, physical, part) in volume.storage.write_places(at, len).unwrap() {
        let part = usize::try_from(part.start).unwrap()..usize::try_from(part.end).unwrap();
        let image = std::fs::File::options().write(true).open(&disks.images()[member]).unwrap();
        image.write_all_at(&bytes[part], physical.0).unwrap();
    }
}

/// Puts items into a tree, or takes them out, with a commit.
pub(crate) fn edit(disks: &Disks, tree: TreeId, edits: &[(Key, Option<Vec<u8>>)]) {
    let volume = open(disks);
    let mut edits: Vec<ItemEdit<'_>> =
        edits.iter().map(|(key, data)| (*key, data.as_deref())).collect();
    edits.sort_by_key(|(key, _)| *key);
    volume.join().unwrap().change(tree, |tree| tree.apply_batch(&edits)).unwrap();
    volume.commit().unwrap();
}

/// `btrfs check` finds nothing.
pub(crate) fn check(disks: &Disks) {
    let attached = AttachedImages::new(disks.images());
    let said = run("btrfs", &["check", "--readonly", attached.devices()[0]]);
    assert!(!said.contains("mismatch"), "{said}");
}

/// The item of an extended attribute of the root directory: these may be any number, at keys that
/// look random.
pub(crate) fn xattr(name: &[u8], value: &[u8]) -> (Key, Vec<u8>) {
    let key = Key::new(256, ItemType::XATTR_ITEM, name_hash(name));
    let len = |bytes: &[u8]| u16::try_from(bytes.len()).expect("it fits a leaf").to_le_bytes();
    let mut data = vec![0; 17];
    data.extend_from_slice(&1u64.to_le_bytes());
    data.extend_from_slice(&len(value));
    data.extend_from_slice(&len(name));
    data.push(8);
    data.extend_from_slice(name);
    data.extend_from_slice(value);
    (key, data)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use offshoot_testkit::btrfs::checked::ShownVolume;
    use offshoot_vfs::{EntryPlace, FileSystem as _, FileSystemMut as _, NewFile};

    use super::*;

    /// What is said when the device is dropped.
    fn complaint(device: impl Sized) -> String {
        let panic = catch_unwind(AssertUnwindSafe(|| drop(device))).expect_err("a complaint");
        *panic.downcast::<String>().expect("a message")
    }

    /// A volume, with one byte of it changed in what a device keeps above another.
    #[test]
    fn what_is_written_above_another_device_is_checked() {
        if !judges::are_present() {
            return;
        }
        let below = in_memory(16384);
        let above = CheckedDevice::over(below.clone());
        let mut superblock = vec![0; 4096];
        below.read_at(65536, &mut superblock).expect("it reads");
        superblock[100] ^= 1;
        above.write_at(65536, &superblock).expect("memory is written");
        let said = complaint(above);
        assert!(said.contains("btrfs check"), "{said}");
    }

    /// Shows another volume than the one that is on the device: it has a file.
    fn show_another(_: &Arc<dyn BlockDevice>) -> ShownVolume {
        let device: Arc<dyn BlockDevice> = bare(16384);
        let volume = BtrfsVolume::open_writable(vec![device.clone()], &EngineOptions::default());
        let fs = volume.expect("it opens").filesystem(TreeId::FS).expect("every volume has one");
        let at = Timestamp::default();
        let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at };
        fs.create(EntryPlace { dir: fs.root(), name: b"file" }, &new).expect("there is room");
        fs.sync().expect("a commit");
        show(&[device]).expect("it opens")
    }

    #[test]
    fn what_the_kernel_shows_otherwise_is_told() {
        if !judges::are_present() {
            return;
        }
        let device = Arc::new(CheckedDevice::sparse(1 << 30, show_another));
        make(device.clone(), 16384);
        device.have_kernel_judge();
        let said = complaint(device);
        assert!(said.contains("the kernel shows") && said.contains("file"), "{said}");
    }
}
