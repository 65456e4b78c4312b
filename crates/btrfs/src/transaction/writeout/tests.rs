//! The requests of a commit, as the devices see them.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, Profile};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::{
    EntryPlace, Fallocate, FileSystem as _, FileSystemMut as _, NewFile, Timestamp,
};
use parking_lot::Mutex;
use uuid::Uuid;

use super::REQUEST_BYTES;
use crate::block::TreeBlock;
use crate::test_volumes::bare_of;
use crate::tree::Blocks;
use crate::{BtrfsVolume, EngineOptions, MkfsOptions, SubvolumeId, mkfs};

const NODE_SIZE: u32 = 16384;
const AT: Timestamp = Timestamp { secs: 0, nanos: 0 };
/// The inode number of the test items. No file of the new volume has it.
const OBJECT: u64 = 1 << 20;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordedRequest {
    Write { member: usize, offset: u64, len: u64 },
    Flush,
}

/// A member that records its writes in a list that all members share.
#[derive(Debug)]
struct RecordingDevice {
    member: usize,
    device: Arc<MemoryDevice>,
    seen: Arc<Mutex<Vec<RecordedRequest>>>,
}

impl offshoot_device::Delegate for RecordingDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.device
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        BlockDevice::write_vectored_at(self, offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        self.seen.lock().push(RecordedRequest::Write { member: self.member, offset, len });
        self.inner().write_vectored_at(offset, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        self.seen.lock().push(RecordedRequest::Flush);
        self.inner().flush()
    }
}

/// A volume on devices that record writes.
struct RecordedVolume {
    devices: Vec<Arc<MemoryDevice>>,
    seen: Arc<Mutex<Vec<RecordedRequest>>>,
    volume: Arc<BtrfsVolume>,
}

impl RecordedVolume {
    /// Opens the volume that is on `devices`.
    fn open(devices: Vec<Arc<MemoryDevice>>) -> Self {
        let seen = Arc::<Mutex<Vec<RecordedRequest>>>::default();
        let noting = |(member, device): (usize, &Arc<MemoryDevice>)| {
            let (device, seen) = (device.clone(), seen.clone());
            Arc::new(RecordingDevice { member, device, seen }) as Arc<dyn BlockDevice>
        };
        let members = devices.iter().enumerate().map(noting).collect();
        let options = EngineOptions {
            commit_interval: None,
            dirty_bytes: u64::MAX,
            ..EngineOptions::default()
        };
        let volume = BtrfsVolume::open_writable(members, &options).expect("it opens");
        Self { devices, seen, volume }
    }

    /// Inserts items, of which four fill a leaf.
    fn fill_leaves(&self, leaves: Range<u64>) {
        for leaf in leaves {
            let handle = self.volume.join().expect("there is room");
            for number in leaf * 4..(leaf + 1) * 4 {
                let key = Key::new(OBJECT, ItemType::STRING_ITEM, number);
                let insert = handle.change(TreeId::FS, |tree| tree.insert(key, &[7; 3900]));
                insert.expect("the change goes through");
            }
        }
    }

    /// The writes of blocks by one commit: member, offset and length of each, in their order.
    fn commit(&self) -> Vec<(usize, u64, u64)> {
        self.seen.lock().clear();
        self.volume.commit().expect("a commit");
        let seen = self.seen.lock().clone();
        let blocks = seen.iter().map_while(|seen| match *seen {
            RecordedRequest::Write { member, offset, len } => Some((member, offset, len)),
            RecordedRequest::Flush => None,
        });
        blocks.collect()
    }

    /// Requires that every block below `block`, itself included, is in all its places.
    fn require_everywhere(&self, block: &TreeBlock) {
        let node_size = u64::from(NODE_SIZE);
        let at = Logical(block.header().bytenr.get());
        for (member, physical, part) in
            self.volume.storage.write_places(at, node_size).expect("places")
        {
            let part = usize::try_from(part.start).unwrap()..usize::try_from(part.end).unwrap();
            let mut stored = vec![0; part.len()];
            self.devices[member].read_at(physical.0, &mut stored).expect("memory");
            assert!(stored == block.bytes()[part], "the block at {at} on member {member}");
        }
        if !block.is_leaf() {
            for slot in 0..block.len() {
                let child = self.volume.child(block, slot, TreeId::FS).expect("it verifies");
                self.require_everywhere(&child);
            }
        }
    }
}

/// On each member, each write lies behind the one before. Two requests are neighbours only if the
/// first one has the greatest size.
fn require_order(writes: &[(usize, u64, u64)], members: usize) {
    for member in 0..members {
        let own: Vec<_> = writes.iter().filter(|write| write.0 == member).collect();
        assert!(!own.is_empty(), "nothing goes to member {member}");
        for pair in own.windows(2) {
            let (&&(_, one, len), &&(_, next, _)) = (&pair[0], &pair[1]);
            assert!(one + len <= next, "{one}+{len}, then {next} on member {member}");
            let is_cut_short = one + len == next && len < REQUEST_BYTES as u64;
            assert!(!is_cut_short, "{one}+{len} could have gone on, on member {member}");
        }
    }
    let bytes: u64 = writes.iter().map(|write| write.2).sum();
    let mean = bytes / writes.len() as u64;
    assert!(mean >= REQUEST_BYTES as u64 / 2, "{mean} bytes a request, {} requests", writes.len());
}

/// Before the mend, writes to DUP chunks went back and forth between the copies with every MiB.
#[test]
fn each_member_is_written_from_its_beginning_to_its_end() {
    for (members, profile) in [(1, Profile::Dup), (2, Profile::Raid1), (4, Profile::Raid10)] {
        let sparse = || Arc::new(MemoryDevice::sparse(16 << 30));
        let devices: Vec<_> = (0..members).map(|_| sparse()).collect();
        let plain: Vec<_> = devices.iter().map(|one| one.clone() as Arc<dyn BlockDevice>).collect();
        let mut options = MkfsOptions::new(Uuid::from_u128(7), AT);
        options.metadata = Some(profile);
        mkfs(&plain, &options).expect("a volume");
        let noted = RecordedVolume::open(devices);
        noted.fill_leaves(0..600);
        let writes = noted.commit();
        eprintln!("{profile}: {} requests", writes.len());
        require_order(&writes, members);
        let copied: u64 = writes.iter().map(|write| write.2).sum();
        assert!(copied > 2 * 600 * u64::from(NODE_SIZE), "{profile}: {copied} bytes");
        let root = noted.volume.tree(TreeId::FS).expect("the tree");
        let root = noted.volume.block(&root.expected()).expect("it verifies");
        noted.require_everywhere(&root);
    }
}

/// The chunks of metadata, by address.
fn metadata_chunks(volume: &BtrfsVolume) -> Vec<Chunk> {
    let is_metadata = |chunk: &Chunk| chunk.flags.0 & BlockGroupFlags::METADATA != 0;
    volume.chunks().filter(is_metadata).collect()
}

/// Allocates one more chunk of metadata.
fn add_metadata_chunk(volume: &BtrfsVolume) {
    let before = metadata_chunks(volume).len();
    let grown = (1..1024).any(|mib| {
        volume.upkeep.look_for_room(volume, mib << 20).expect("nothing fails");
        metadata_chunks(volume).len() > before
    });
    assert!(grown, "there is no place for a chunk");
}

/// A new chunk takes the place of a removed one, and lies before a chunk with a lower address.
#[test]
fn chunks_are_written_in_the_order_of_the_device_and_not_of_their_addresses() {
    let noted = RecordedVolume::open(vec![bare_of(NODE_SIZE, 256 << 20)]);
    let volume = &noted.volume;
    let fs = volume.filesystem(SubvolumeId::FS).expect("the top level");
    let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
    let place = EntryPlace { dir: fs.root(), name: b"file" };
    let file = fs.create(place, &new).expect("a file");
    let allocate = Fallocate::Allocate { keeps_size: false };
    let end = |chunk: Chunk| chunk.stripes[0].physical.0 + chunk.length;
    for at in (0..).step_by(8 << 20) {
        if volume.chunks().map(end).max() > Some(192 << 20) {
            break;
        }
        fs.fallocate(file, allocate, at, 8 << 20, AT).expect("there is room");
    }
    add_metadata_chunk(volume);
    let leaves = |chunk: &Chunk| chunk.length / u64::from(NODE_SIZE);
    // Some leaves are in the new chunk, so it stays when the data is removed.
    let first = leaves(&metadata_chunks(volume)[0]) + 64;
    noted.fill_leaves(0..first);
    fs.unlink(place, AT).expect("it is there");
    fs.sync().expect("a commit");
    fs.sync().expect("a commit");
    add_metadata_chunk(volume);
    let chunks = metadata_chunks(volume);
    let [_, high, low] = &chunks[..] else { panic!("{chunks:?}") };
    assert!(low.stripes[1].physical < high.stripes[0].physical, "{chunks:?}");
    noted.fill_leaves(first..first + leaves(high) + 64);
    let writes = noted.commit();
    require_order(&writes, 1);
    for chunk in [high, low] {
        let begin = chunk.stripes[0].physical.0;
        let is_in = |write: &&(usize, u64, u64)| (begin..begin + chunk.length).contains(&write.1);
        assert!(writes.iter().filter(is_in).count() > 0, "nothing at {}", chunk.start);
    }
}
