//! Disks: what lies between a file of the host and a volume.
//!
//! ```text
//! disk.img          ──> the whole file, when it is a volume itself
//!                   ──> else the one partition that holds a volume
//! disk.img@2        ──> partition 2; also by its label, or its UUID
//! disk.img --offset ──> from a byte on, whatever is there
//! ```
//!
//! The file may be an image of a disk, or compressed: a qcow2, or zstd over one.
//!
//! Which one it is decides before the engine looks at anything, so an error can say what the file
//! is and what to write instead.
//!
//! | module | what it holds |
//! |---|---|
//! | [`name`] | `FILE@PARTITION` |
//! | [`contents`] | what a disk and its partitions hold |
//! | [`layers`] | images, and their backing files |
//! | [`shared`] | files that are open, so that two partitions of one disk share it |

mod contents;
mod layers;
mod name;
mod shared;

use std::io;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, FileDevice, WindowDevice};

use contents::Contents;
use layers::Layered;
pub(crate) use name::{DiskName, is_file};
use offshoot_transfer::host::{HostId, host_id_of_file};
pub(crate) use shared::open_files;

use crate::args::LayerArguments;
use crate::exit::{Failure, Result};
use crate::output::Escaped;
use crate::place::{mistaken_for_place, without_colon};
use crate::session::Access;

/// Which volume it is: the file of the host, and where in it the volume begins.
pub(crate) type VolumeId = (HostId, u64);

/// A device that should hold a member of a volume.
pub(crate) struct Disk {
    /// The device.
    pub(crate) device: Arc<dyn BlockDevice>,
    /// Which one it is.
    pub(crate) id: VolumeId,
    /// The layers above the file, the lowest one first: `qcow2`, `gpt:2`.
    pub(crate) layers: Vec<String>,
    /// What is wrong with a layer, though it can be used.
    pub(crate) warnings: Vec<String>,
}

impl Disk {
    /// Opens the disk that `path` names and finds the volume on it. `may_have_path` tells whether
    /// the command line names it together with a path in the volume.
    pub(crate) fn open(
        path: &Path,
        access: Access,
        arguments: &LayerArguments,
        may_have_path: bool,
    ) -> Result<Self> {
        let whole = Whole::open(path, access, arguments, may_have_path)?;
        if let Some(start) = arguments.offset {
            return whole.at_offset(path, start);
        }
        let contents = Contents::read(&*whole.device, &whole.name.file)?;
        let chosen = contents.choose(&whole.name, may_have_path)?;
        whole.partition(path, chosen)
    }

    /// All of the file at `path`, which is open.
    pub(crate) fn of_file(path: &Path, device: FileDevice) -> io::Result<Self> {
        let host = host_id_of_file(path).ok_or(io::ErrorKind::NotFound)?;
        let device = Arc::new(device);
        Ok(Self { device, id: (host, 0), layers: Vec::new(), warnings: Vec::new() })
    }

    /// Opens what `path` names to make a volume on it: a whole disk, or the partition that is
    /// named.
    pub(crate) fn open_to_make(path: &Path, arguments: &LayerArguments) -> Result<Self> {
        let whole = Whole::open(path, Access::Write, arguments, false)?;
        if let Some(start) = arguments.offset {
            // The volume would reach to the end of the disk, over all partitions that follow.
            if whole.contents()?.table.is_some() {
                let message = format!(
                    "{}: it has a partition table, and a volume at an offset reaches to its end: \
                     name a partition as FILE@NUMBER",
                    path.display()
                );
                return Err(Failure::Refused(message));
            }
            return whole.at_offset(path, start);
        }
        if whole.name.partition.is_none() {
            return whole.partition(path, None);
        }
        let contents = whole.contents()?;
        if contents.is_table_guessed {
            // What is in one partition may be the rest of an older layout.
            let file = whole.name.file.display();
            let message = format!(
                "{file}: its MBR seems to count in sectors of 4096 bytes, and a file does not say \
                 so: attach it (losetup --sector-size 4096 -f {file}), and name the device"
            );
            return Err(Failure::Refused(message));
        }
        let chosen = contents.choose(&whole.name, false)?;
        whole.partition(path, chosen)
    }
}

/// Refuses disks that have bytes in common: one that is named twice, and partitions that overlap.
pub(crate) fn refuse_shared(disks: &[Disk]) -> Result {
    let range = |disk: &Disk| disk.id.1..disk.id.1.saturating_add(disk.device.size_bytes());
    for (at, second) in disks.iter().enumerate() {
        let (this, (host, _)) = (range(second), second.id);
        let shares = |first: &&Disk| {
            let other = range(first);
            first.id.0 == host && other.start < this.end && this.start < other.end
        };
        if let Some(first) = disks[..at].iter().find(shares) {
            return Err(Failure::Refused(in_common(first.device.name(), second.device.name())));
        }
    }
    Ok(())
}

/// What is said of two devices that have bytes in common.
pub(crate) fn in_common(first: &str, second: &str) -> String {
    let (first, second) = (Escaped(first.as_bytes()), Escaped(second.as_bytes()));
    format!(
        "{first} and {second} have bytes in common, and members of a volume have none: name each \
         device once"
    )
}

/// A file of the host that is open, with nothing chosen in it.
pub(crate) struct Whole {
    /// How it was named.
    pub(crate) name: DiskName,
    /// All of the file, or of the disk that is in it.
    pub(crate) device: Arc<dyn BlockDevice>,
    host: HostId,
    /// The images around it.
    pub(crate) layers: Vec<String>,
    /// The snapshots in the image, by name.
    pub(crate) snapshots: Vec<String>,
}

impl Whole {
    /// Opens the file that `path` names.
    pub(crate) fn open(
        path: &Path,
        access: Access,
        arguments: &LayerArguments,
        may_have_path: bool,
    ) -> Result<Self> {
        let name = DiskName::parse(path);
        let opened = shared::open(&name.file, access, arguments);
        let (layered, host) = opened.map_err(|failure| match failure {
            Failure::Host(_, error) if error.kind() == io::ErrorKind::NotFound => {
                match mistaken_for_place(path, may_have_path) {
                    Some(mistake) => Failure::Usage(mistake),
                    None => Failure::Host(path.display().to_string(), error),
                }
            }
            Failure::Host(name, error)
                if error.kind() == io::ErrorKind::NotADirectory && may_have_path =>
            {
                without_colon(path).map_or(Failure::Host(name, error), Failure::Usage)
            }
            other => other,
        })?;
        let Layered { device, layers, snapshots, .. } = layered;
        Ok(Self { name, device, host, layers, snapshots })
    }

    /// What is in it.
    pub(crate) fn contents(&self) -> Result<Contents> {
        Contents::read(&*self.device, &self.name.file)
    }

    fn at_offset(self, path: &Path, start: u64) -> Result<Disk> {
        if self.name.partition.is_some() {
            let message =
                format!("{} names a partition, and --offset goes without", path.display());
            return Err(Failure::Usage(message));
        }
        let range = start..self.device.size_bytes();
        let name = path.display().to_string();
        let window = WindowDevice::new(self.device, range, name.clone())
            .map_err(|error| Failure::Host(name, error))?;
        Ok(Disk {
            device: Arc::new(window),
            id: (self.host, start),
            layers: [self.layers, vec![format!("offset:{start}")]].concat(),
            warnings: Vec::new(),
        })
    }

    /// The partition that was chosen, or all of it.
    fn partition(self, path: &Path, chosen: Option<contents::Chosen>) -> Result<Disk> {
        let Some(chosen) = chosen else {
            let (layers, warnings) = (self.layers, Vec::new());
            return Ok(Disk { device: self.device, id: (self.host, 0), layers, warnings });
        };
        let contents::Chosen { kind, partition, warning } = chosen;
        let name = format!("{}@{}", self.name.file.display(), partition.number);
        let start = partition.range.start;
        let window = WindowDevice::new(self.device, partition.range, name)
            .map_err(|error| Failure::Host(path.display().to_string(), error))?;
        let shown = self.name.file.display();
        Ok(Disk {
            device: Arc::new(window),
            id: (self.host, start),
            layers: [self.layers, vec![format!("{}:{}", kind.name(), partition.number)]].concat(),
            warnings: warning.map(|what| format!("{shown}: {what}")).into_iter().collect(),
        })
    }
}
