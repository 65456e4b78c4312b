//! Disks: what lies between a file of the host and a volume.
//!
//! ```text
//! disk.img          ──> the whole file, when it is a volume itself
//!                   ──> else the one partition that holds a volume
//! disk.img@2        ──> partition 2; also by its label, or its UUID
//! disk.img --offset ──> from a byte on, whatever is there
//! ```
//!
//! The file may be an image of a disk, or compressed: a qcow2, or a zstd stream that contains one.
//!
//! This module chooses the volume before the engine reads anything. So an error can say what the
//! file is and what to write instead.
//!
//! | module | what it holds |
//! |---|---|
//! | [`name`] | `FILE@PARTITION` |
//! | [`contents`] | what a disk and its partitions hold |
//! | [`format`](mod@format) | the formats of volumes |
//! | [`layers`] | what to do about images that do not open |
//! | [`shared`] | open files: two partitions of one disk share the open file |

mod contents;
mod format;
mod layers;
mod name;
mod shared;

use std::io;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, FileDevice, OpenedDisk, WindowDevice};

use contents::NamedContents;
pub(crate) use name::{DiskName, is_file};
use offshoot_transfer::host::{HostId, host_id_of_file};
pub(crate) use shared::open_files;

use crate::args::LayerArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::Escaped;
use crate::place::{mistaken_for_place, without_colon};
use crate::session::Access;

/// The identity of a volume: the file of the host, and the byte offset of the volume in it.
pub(crate) type VolumeId = (HostId, u64);

/// A device that should hold a member of a volume.
pub(crate) struct MemberDisk {
    /// The device.
    pub(crate) device: Arc<dyn BlockDevice>,
    /// The identity of the member.
    pub(crate) id: VolumeId,
    /// The layers above the file, lowest first, such as `qcow2` and `gpt:2`.
    pub(crate) layers: Vec<String>,
    /// Faults in a layer that do not prevent its use.
    pub(crate) warnings: Vec<String>,
}

impl MemberDisk {
    /// Opens the disk that `path` names and finds the volume on it. `may_have_path` says whether a
    /// path in the volume may follow the name on the command line.
    pub(crate) fn open(
        path: &Path,
        access: Access,
        arguments: &LayerArguments,
        may_have_path: bool,
    ) -> Result<Self> {
        let whole = WholeDisk::open(path, access, arguments, may_have_path)?;
        if let Some(start) = arguments.offset {
            return whole.at_offset(path, start);
        }
        let contents = NamedContents::read(&*whole.device, &whole.name.file)?;
        let chosen = contents.choose(&whole.name, may_have_path)?;
        whole.partition(path, chosen)
    }

    /// The whole file at `path`, which is open already.
    pub(crate) fn of_file(path: &Path, device: FileDevice) -> io::Result<Self> {
        let host = host_id_of_file(path).ok_or(io::ErrorKind::NotFound)?;
        let device = Arc::new(device);
        Ok(Self { device, id: (host, 0), layers: Vec::new(), warnings: Vec::new() })
    }

    /// Opens `path` for `mkfs`: the whole disk, or the partition that the name selects.
    pub(crate) fn open_to_make(path: &Path, arguments: &LayerArguments) -> Result<Self> {
        let whole = WholeDisk::open(path, Access::Write, arguments, false)?;
        if let Some(start) = arguments.offset {
            // The volume would reach to the end of the disk, over all partitions behind the offset.
            if whole.contents()?.table.is_some() {
                let message = format!(
                    "{}: it has a partition table, and a volume at an offset reaches to its end: \
                     name a partition as FILE@NUMBER",
                    path.display()
                );
                return Err(VerbFailure::Refused(message));
            }
            return whole.at_offset(path, start);
        }
        if whole.name.partition.is_none() {
            return whole.partition(path, None);
        }
        let contents = whole.contents()?;
        if contents.is_table_guessed {
            // The contents of a guessed partition may be left over from an older layout.
            let file = whole.name.file.display();
            let message = format!(
                "{file}: its MBR seems to count in sectors of 4096 bytes, and a file does not say \
                 so: attach it (losetup --sector-size 4096 -f {file}), and name the device"
            );
            return Err(VerbFailure::Refused(message));
        }
        let chosen = contents.choose(&whole.name, false)?;
        whole.partition(path, chosen)
    }
}

/// Refuses disks that share bytes: one disk that is named twice, or overlapping partitions.
pub(crate) fn refuse_shared(disks: &[MemberDisk]) -> Result {
    let range = |disk: &MemberDisk| disk.id.1..disk.id.1.saturating_add(disk.device.size_bytes());
    for (at, second) in disks.iter().enumerate() {
        let (this, (host, _)) = (range(second), second.id);
        let shares = |first: &&MemberDisk| {
            let other = range(first);
            first.id.0 == host && other.start < this.end && this.start < other.end
        };
        if let Some(first) = disks[..at].iter().find(shares) {
            return Err(VerbFailure::Refused(in_common(first.device.name(), second.device.name())));
        }
    }
    Ok(())
}

/// The message about two devices that share bytes.
pub(crate) fn in_common(first: &str, second: &str) -> String {
    let (first, second) = (Escaped(first.as_bytes()), Escaped(second.as_bytes()));
    format!(
        "{first} and {second} have bytes in common, and members of a volume have none: name each \
         device once"
    )
}

/// An open file of the host, before a partition is chosen.
pub(crate) struct WholeDisk {
    /// Its name on the command line.
    pub(crate) name: DiskName,
    /// The whole file, or the disk inside the image.
    pub(crate) device: Arc<dyn BlockDevice>,
    host: HostId,
    /// The image layers above the file.
    pub(crate) layers: Vec<String>,
    /// The names of the snapshots in the image.
    pub(crate) snapshots: Vec<String>,
}

impl WholeDisk {
    /// Opens the file that `path` names.
    pub(crate) fn open(
        path: &Path,
        access: Access,
        arguments: &LayerArguments,
        may_have_path: bool,
    ) -> Result<Self> {
        let name = DiskName::parse(path);
        let opened = shared::open(&name.file, access, arguments);
        let (opened, host) = opened.map_err(|failure| match failure {
            VerbFailure::Host(_, error) if error.kind() == io::ErrorKind::NotFound => {
                match mistaken_for_place(path, may_have_path) {
                    Some(mistake) => VerbFailure::Usage(mistake),
                    None => VerbFailure::Host(path.display().to_string(), error),
                }
            }
            VerbFailure::Host(name, error)
                if error.kind() == io::ErrorKind::NotADirectory && may_have_path =>
            {
                without_colon(path).map_or(VerbFailure::Host(name, error), VerbFailure::Usage)
            }
            other => other,
        })?;
        let OpenedDisk { device, layers, snapshots, .. } = opened;
        Ok(Self { name, device, host, layers, snapshots })
    }

    /// Reads what the disk and its partitions hold.
    pub(crate) fn contents(&self) -> Result<NamedContents> {
        NamedContents::read(&*self.device, &self.name.file)
    }

    fn at_offset(self, path: &Path, start: u64) -> Result<MemberDisk> {
        if self.name.partition.is_some() {
            let message =
                format!("{} names a partition, and --offset goes without", path.display());
            return Err(VerbFailure::Usage(message));
        }
        let range = start..self.device.size_bytes();
        let name = path.display().to_string();
        let window = WindowDevice::new(self.device, range, name.clone())
            .map_err(|error| VerbFailure::Host(name, error))?;
        Ok(MemberDisk {
            device: Arc::new(window),
            id: (self.host, start),
            layers: [self.layers, vec![format!("offset:{start}")]].concat(),
            warnings: Vec::new(),
        })
    }

    /// The chosen partition, or the whole disk.
    fn partition(
        self,
        path: &Path,
        chosen: Option<contents::ChosenPartition>,
    ) -> Result<MemberDisk> {
        let Some(chosen) = chosen else {
            let (layers, warnings) = (self.layers, Vec::new());
            return Ok(MemberDisk { device: self.device, id: (self.host, 0), layers, warnings });
        };
        let contents::ChosenPartition { kind, partition, warning } = chosen;
        let name = format!("{}@{}", self.name.file.display(), partition.number);
        let start = partition.range.start;
        let window = WindowDevice::new(self.device, partition.range, name)
            .map_err(|error| VerbFailure::Host(path.display().to_string(), error))?;
        let shown = self.name.file.display();
        Ok(MemberDisk {
            device: Arc::new(window),
            id: (self.host, start),
            layers: [self.layers, vec![format!("{}:{}", kind.name(), partition.number)]].concat(),
            warnings: warning.map(|what| format!("{shown}: {what}")).into_iter().collect(),
        })
    }
}
