//! Makes volumes from one description, with either side's `mkfs`.

use std::collections::HashSet;

use offshoot_btrfs::{
    BtrfsVolume, Compress, Engine, EngineOptions, Filesystem, MkfsOptions, SubvolumeId, mkfs,
};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_testkit::btrfs::disks::{Disks, OLD_CACHE, UUID_TREE};
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::random::Random;
use offshoot_vfs::{FileId, Timestamp};
use uuid::Uuid;

/// The side that makes a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VolumeMaker {
    Ours,
    Progs,
}

/// A volume: how many members of how many MiB, and the options of `mkfs.btrfs`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PingpongLayout {
    pub(crate) devices: usize,
    pub(crate) mib: u64,
    pub(crate) options: &'static str,
}

impl PingpongLayout {
    pub(crate) fn make(&self, judges: &Judges, maker: VolumeMaker) -> Disks {
        let disks = Disks::create(judges, self.devices, self.mib);
        let words: Vec<_> = self.options.split_whitespace().collect();
        match maker {
            VolumeMaker::Progs => disks.mkfs(&words),
            VolumeMaker::Ours => {
                mkfs(&disks.writable_devices(), &options(&words)).expect("mkfs");
            }
        }
        disks
    }

    /// The sides that can make it: our `mkfs` offers no quotas.
    pub(crate) fn makers(&self) -> &'static [VolumeMaker] {
        if self.options.contains("quota") {
            &[VolumeMaker::Progs]
        } else {
            &[VolumeMaker::Ours, VolumeMaker::Progs]
        }
    }

    /// What the kernel may say of it in its log, on the first mount or on a later one. We make the
    /// UUID tree complete, and both sides keep it so.
    pub(crate) fn expected(&self, is_first_mount: bool) -> Vec<&'static str> {
        let old_cache = self.options.contains("^free-space-tree").then_some(OLD_CACHE);
        old_cache.into_iter().chain(is_first_mount.then_some(UUID_TREE)).collect()
    }
}

/// Our options for these options of `mkfs.btrfs`.
fn options(words: &[&str]) -> MkfsOptions {
    // The kernel mounts no two volumes with the same id, and tests run side by side.
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut random| std::io::Read::read_exact(&mut random, &mut bytes))
        .expect("random bytes");
    let time = Timestamp { secs: 1_700_000_000, nanos: 123_456_789 };
    let mut options = MkfsOptions::new(Uuid::from_bytes(bytes), time);
    options.seed = Random::new(u64::from(bytes[0])).number();
    let mut words = words.to_vec();
    if let Some(index) = words.iter().position(|&word| word == "--mixed") {
        words.remove(index);
        options.features.apply("mixed-bg").expect("a known feature");
    }
    for pair in words.chunks(2) {
        let [option, value] = pair else { panic!("{pair:?} has no value") };
        match *option {
            "-n" => options.node_size = Some(value.parse().expect("a number of bytes")),
            "--csum" => options.checksum = checksum(value),
            "-d" => options.data = Some(profile(value)),
            "-m" => options.metadata = Some(profile(value)),
            "-O" => options.features.apply(value).expect("known features"),
            other => panic!("{other} is no option that both sides have"),
        }
    }
    options
}

fn checksum(name: &str) -> ChecksumType {
    match name {
        "crc32c" => ChecksumType::Crc32c,
        "xxhash" => ChecksumType::Xxhash64,
        "sha256" => ChecksumType::Sha256,
        "blake2" => ChecksumType::Blake2b,
        other => panic!("no checksum {other}"),
    }
}

fn profile(name: &str) -> Profile {
    match name {
        "single" => Profile::Single,
        "dup" => Profile::Dup,
        "raid0" => Profile::Raid0,
        "raid1" => Profile::Raid1,
        "raid1c3" => Profile::Raid1c3,
        "raid1c4" => Profile::Raid1c4,
        "raid10" => Profile::Raid10,
        other => panic!("no profile {other}"),
    }
}

/// The top level for writing. It compresses what is written with `method`.
pub(crate) fn open(disks: &Disks, method: Option<&str>) -> Filesystem {
    let devices = disks.writable_devices();
    let compress = method
        .map(|method| Compress { method: method.parse().expect("a method"), is_forced: true });
    let options = EngineOptions { compress, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(devices, &options).expect("it opens");
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// The top level for reading.
pub(crate) fn open_read_only(disks: &Disks) -> Filesystem {
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
    volume.filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// The committed files whose data has no checksums. The kernel's view of a file does not tell that.
pub(crate) fn without_checksums(volume: &Engine) -> HashSet<FileId> {
    let mut found = HashSet::new();
    let subvolumes = volume.subvolumes().map(|info| info.expect("a subvolume").id);
    for id in subvolumes.collect::<Vec<_>>() {
        let root = volume.tree(id).expect("it has a root");
        let mut cursor = volume.cursor(root, Key::MIN).expect("it reads");
        while let Some((key, data)) = cursor.item() {
            if key.item_type == ItemType::INODE_ITEM {
                let item = InodeItem::view(data).expect("an inode item");
                if item.flags.get() & inode_flags::NODATASUM != 0 {
                    found.insert(FileId { dev: id.0, ino: key.objectid });
                }
            }
            cursor.advance().expect("it reads");
        }
    }
    found
}
