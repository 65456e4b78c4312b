//! Members are written and read at a time: their requests meet.
//!
//! A request of the kind that a test chooses waits until each of the other members has one too. A
//! request that waits in vain is counted. So the tests prove that requests overlap, and measure no
//! time.

use std::collections::HashSet;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, MkfsOptions, SubvolumeId, mkfs};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::superblock::SUPERBLOCK_OFFSETS;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut, NewFile, Timestamp};
use parking_lot::{Condvar, Mutex};
use uuid::Uuid;

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o600, uid: 0, gid: 0, umask: None, at: AT };

/// How long a request waits for the others. Only a test that fails waits so long.
const PATIENCE: Duration = Duration::from_secs(10);

/// The kinds of requests that meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MeetingKind {
    Nothing,
    Barriers,
    Superblocks,
    /// All other writes: of data and of tree blocks.
    Writes,
    Reads,
}

/// Where the requests of the members meet.
#[derive(Debug, Default)]
struct Meeting {
    state: Mutex<MeetingState>,
    is_changed: Condvar,
}

#[derive(Debug)]
struct MeetingState {
    kind: MeetingKind,
    /// How many members have to be there.
    members: usize,
    /// The members that are there.
    there: Vec<usize>,
    /// How many meetings there were.
    met: u64,
    /// The requests that were alone, in words.
    alone: Vec<String>,
}

impl Default for MeetingState {
    fn default() -> Self {
        let (there, alone) = (Vec::new(), Vec::new());
        Self { kind: MeetingKind::Nothing, members: 0, there, met: 0, alone }
    }
}

impl Meeting {
    /// From now on requests of this kind wait until `members` members are there.
    fn call(&self, kind: MeetingKind, members: usize) {
        *self.state.lock() = MeetingState { kind, members, ..MeetingState::default() };
    }

    /// Ends the meetings. Returns how many there were.
    #[track_caller]
    fn end(&self) -> u64 {
        let state = std::mem::take(&mut *self.state.lock());
        assert!(state.alone.is_empty(), "{:?} that were alone: {:?}", state.kind, state.alone);
        state.met
    }

    /// Waits until so many requests have come, or met.
    fn wait_for(&self, requests: usize) {
        let mut state = self.state.lock();
        while state.there.len() < requests && state.met == 0 && state.kind != MeetingKind::Nothing {
            self.is_changed.wait(&mut state);
        }
    }

    /// Lets all waiting requests go on, and calls no more meetings.
    fn dismiss(&self) {
        self.state.lock().kind = MeetingKind::Nothing;
        self.is_changed.notify_all();
    }

    fn attend(&self, member: usize, kind: MeetingKind, what: impl Fn() -> String) {
        let mut state = self.state.lock();
        if state.kind != kind {
            return;
        }
        state.there.push(member);
        self.is_changed.notify_all();
        let others: HashSet<_> = state.there.iter().collect();
        if others.len() == state.members {
            state.there.clear();
            state.met += 1;
            self.is_changed.notify_all();
            return;
        }
        let met = state.met;
        while state.kind == kind && state.met == met {
            if self.is_changed.wait_for(&mut state, PATIENCE).timed_out() && state.met == met {
                state.there.clear();
                state.alone.push(what());
                return;
            }
        }
    }
}

/// A member whose requests meet those of the others.
#[derive(Debug)]
struct MeetingDevice {
    member: usize,
    device: Arc<MemoryDevice>,
    meeting: Arc<Meeting>,
}

impl offshoot_device::Delegate for MeetingDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.device
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        BlockDevice::read_vectored_at(self, offset, &mut [IoSliceMut::new(buf)])
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let what = || format!("a read at {offset} of {}", self.member);
        self.meeting.attend(self.member, MeetingKind::Reads, what);
        self.inner().read_vectored_at(offset, bufs)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        BlockDevice::write_vectored_at(self, offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let is_superblock = SUPERBLOCK_OFFSETS.contains(&offset);
        let kind = if is_superblock { MeetingKind::Superblocks } else { MeetingKind::Writes };
        self.meeting
            .attend(self.member, kind, || format!("a write at {offset} of {}", self.member));
        self.inner().write_vectored_at(offset, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        self.meeting
            .attend(self.member, MeetingKind::Barriers, || format!("a barrier of {}", self.member));
        self.inner().flush()
    }
}

/// An open volume on members that meet.
struct MetVolume {
    meeting: Arc<Meeting>,
    devices: Vec<Arc<dyn BlockDevice>>,
    fs: Filesystem,
}

fn open(devices: &[Arc<dyn BlockDevice>]) -> Filesystem {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(devices.to_vec(), &options).expect("it opens");
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

impl MetVolume {
    fn new(members: usize, metadata: Profile, data: Profile) -> Self {
        let meeting = Arc::<Meeting>::default();
        let device = |member| {
            let device = Arc::new(MemoryDevice::sparse(4 << 30));
            let meeting = meeting.clone();
            Arc::new(MeetingDevice { member, device, meeting }) as Arc<dyn BlockDevice>
        };
        let devices: Vec<_> = (0..members).map(device).collect();
        let mut options = MkfsOptions::new(Uuid::from_u128(7), AT);
        (options.metadata, options.data) = (Some(metadata), Some(data));
        mkfs(&devices, &options).expect("a volume");
        let fs = open(&devices);
        Self { meeting, devices, fs }
    }

    fn create(&self, name: &[u8], data: &[u8]) -> FileId {
        let place = EntryPlace { dir: self.fs.root(), name };
        let file = self.fs.create(place, &NEW).expect("there is room");
        self.fs.write(file, 0, data, AT).expect("there is room");
        file
    }

    /// Opens the volume again, so that nothing is cached.
    fn reopen(&mut self) {
        self.fs.sync().expect("a commit");
        self.fs = open(&self.devices);
    }

    /// Requires that `file` holds `data`.
    #[track_caller]
    fn require(&self, file: FileId, data: &[u8]) {
        let mut found = vec![0; data.len()];
        assert_eq!(self.fs.read(file, 0, &mut found).expect("it verifies"), data.len());
        assert!(found == data, "other bytes");
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 4096 * 31 + at % 13).to_le_bytes()[0]).collect()
}

/// An fsync sends both barriers, the superblocks and their copies to all members at a time.
#[test]
fn barriers_and_superblocks_of_all_members_go_out_at_a_time() {
    for members in [2, 4] {
        let volume = MetVolume::new(members, Profile::Raid1, Profile::Raid1);
        let file = volume.create(b"file", &content(4096));
        volume.fs.sync().expect("a commit");
        for (kind, meetings) in [(MeetingKind::Barriers, 2), (MeetingKind::Superblocks, 2)] {
            volume.fs.write(file, 4096, &content(4096), AT).expect("there is room");
            volume.meeting.call(kind, members);
            volume.fs.fsync(file).expect("nothing fails");
            assert_eq!(volume.meeting.end(), meetings, "{kind:?} of {members} members");
            volume.meeting.call(kind, members);
            volume.fs.sync().expect("nothing fails");
            assert_eq!(volume.meeting.end(), meetings, "{kind:?} of {members} members");
        }
    }
}

/// Both copies of data and of tree blocks are written at a time, and the parts of striped data.
#[test]
fn copies_and_stripes_are_written_at_a_time() {
    for (data, members, meeting) in [
        (Profile::Raid1, 2, 2),
        (Profile::Raid1c4, 4, 4),
        (Profile::Raid0, 2, 2),
        (Profile::Raid10, 4, 4),
    ] {
        let metadata = if members == 2 { Profile::Raid1 } else { Profile::Raid1c4 };
        let volume = MetVolume::new(members, metadata, data);
        volume.fs.sync().expect("a commit");
        let content = content(1 << 20);
        volume.meeting.call(MeetingKind::Writes, meeting);
        let file = volume.create(b"file", &content);
        volume.fs.fsync(file).expect("nothing fails");
        volume.fs.sync().expect("nothing fails");
        assert!(volume.meeting.end() >= 3, "{data}: data, the log and the commit");
        volume.require(file, &content);
    }
}

/// A read that spans several members is one request to each, and these go out at a time.
#[test]
fn a_large_read_goes_to_all_its_members_at_a_time() {
    for (profile, members, meeting) in
        [(Profile::Raid0, 2, 2), (Profile::Raid0, 4, 4), (Profile::Raid10, 4, 2)]
    {
        let mut volume = MetVolume::new(members, Profile::Raid1, profile);
        let content = content(1 << 20);
        let file = volume.create(b"file", &content);
        volume.reopen();
        // Puts the tree blocks into the cache.
        volume.fs.read(file, 0, &mut [0]).expect("it verifies");
        volume.meeting.call(MeetingKind::Reads, meeting);
        volume.require(file, &content);
        assert_eq!(volume.meeting.end(), 1, "{profile} on {members}");
    }
}

/// While readers wait for a member, others read from its mirror.
#[test]
fn readers_of_a_mirror_use_both_members() {
    let mut volume = MetVolume::new(2, Profile::Raid1, Profile::Raid1);
    let content = content(4 << 20);
    let files = [b"1", b"2", b"3", b"4"].map(|name| volume.create(name, &content));
    volume.reopen();
    for file in files {
        volume.fs.read(file, 0, &mut [0]).expect("it verifies");
    }
    volume.meeting.call(MeetingKind::Reads, 2);
    let meeting = &volume.meeting;
    std::thread::scope(|scope| {
        for (number, file) in files.into_iter().enumerate() {
            let (volume, content) = (&volume, &content);
            // Wait for the reads of the readers before, so that this reader finds them under way.
            meeting.wait_for(number);
            scope.spawn(move || {
                volume.require(file, content);
                // The last readers would wait in vain.
                meeting.dismiss();
            });
        }
    });
    assert!(meeting.end() > 0, "all read from one member");
}
