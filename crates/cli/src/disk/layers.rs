//! From a file of the host to the disk in it, as the options of the command line say.
//!
//! [`offshoot_device::OpenedDisk`] opens it. This module says what to do about each obstacle.

use std::path::Path;

use offshoot_device::{DiskError, DiskFormat, DiskObstacle, DiskOptions, OpenedDisk, OtherFiles};

use crate::args::LayerArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::Escaped;
use crate::session::Access;

/// Opens the disk in the file at `path`.
pub(super) fn open_layers(
    path: &Path,
    access: Access,
    arguments: &LayerArguments,
) -> Result<OpenedDisk> {
    let mut options = DiskOptions::default();
    options.is_writable = access == Access::Write;
    options.format = arguments
        .image_format
        .map(|format| format.kind().map_or(DiskFormat::Raw, DiskFormat::Image));
    options.others = if arguments.backing { OtherFiles::All } else { OtherFiles::Beside };
    options.snapshot.clone_from(&arguments.image_snapshot);
    OpenedDisk::open(path, &options).map_err(|error| match error {
        DiskError::Io { path, kind, source } => {
            let kind = kind.map_or_else(String::new, |kind| format!(": {kind}"));
            VerbFailure::Host(format!("{}{kind}", path.display()), source)
        }
        DiskError::Obstacle { path, obstacle } => in_the_way(&path, obstacle, arguments),
    })
}

/// The message about what is in the way at `path`.
fn in_the_way(path: &Path, obstacle: DiskObstacle, arguments: &LayerArguments) -> VerbFailure {
    let shown = path.display();
    let extent = |file: &std::ffi::OsStr, why: &str| {
        use std::os::unix::ffi::OsStrExt;
        VerbFailure::Refused(format!(
            "{shown}: its data is in {}, which {why}",
            Escaped(file.as_bytes())
        ))
    };
    let what = match obstacle {
        DiskObstacle::NoSnapshots => {
            return VerbFailure::Usage(format!("{shown} has no image snapshots"));
        }
        DiskObstacle::SnapshotOnlyRead => {
            return VerbFailure::Usage(format!("{shown}: an image snapshot can only be read"));
        }
        DiskObstacle::OtherSnapshots(there) => {
            let there = if there.is_empty() {
                "it has none".to_owned()
            } else {
                format!("it has {}", there.join(", "))
            };
            let name = arguments.image_snapshot.as_deref().unwrap_or_default();
            return VerbFailure::Usage(format!(
                "{shown}: no image snapshot is called {name}: {there}"
            ));
        }
        DiskObstacle::NeedsExtent(file) => {
            return extent(
                &file,
                "is no plain file beside it, and is only opened when you say so: --backing",
            );
        }
        DiskObstacle::ExtentMissing(file) => return extent(&file, "is not there"),
        DiskObstacle::ExtentTwice(file) => {
            return extent(
                &file,
                "is the descriptor itself, or another name of a file that it names",
            );
        }
        DiskObstacle::BackingLoop => format!("{shown}: its backing files go round in a loop"),
        DiskObstacle::TooDeep => format!("{shown}: too many images inside of each other"),
        DiskObstacle::OnlyRead(kind) => {
            let way = if kind.is_stream() {
                format!("unpack it ({kind} -d), and name the file that this makes")
            } else {
                format!("make an image that is: qemu-img convert -O qcow2 {shown} {shown}.qcow2")
            };
            format!("{shown}: {kind} is only read here, and not written: {way}")
        }
        DiskObstacle::CannotGrow => format!(
            "{shown}: a sparse VMDK on a block device cannot become longer, so it is not written: \
             copy it into a file (cp {shown} FILE), and name that"
        ),
        DiskObstacle::NeedsBacking(name) => format!(
            "{shown}: it needs its backing file {name}, which is only opened when you say so: \
             --backing"
        ),
        DiskObstacle::BackingIsNoFile(name) => format!(
            "{shown}: its backing file {name} is no file: qemu-img convert -O qcow2 {shown} \
             {shown}.qcow2 makes an image without one"
        ),
    };
    VerbFailure::Refused(what)
}
