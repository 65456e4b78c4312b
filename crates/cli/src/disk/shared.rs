//! Files that this process has open, with the images in them.
//!
//! A writer locks its file against all others, even in the same process. But two partitions of one
//! disk are two volumes, or two members of a volume, in one file. So they share the device that was
//! opened first, and it stays open as long as one of them uses it. A compressed stream is unpacked
//! only once for the same reason.

use std::fs::Metadata;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use offshoot_device::{BlockDevice, OpenedDisk};
use offshoot_transfer::host::{HostId, host_id_of, host_id_of_file};

use super::layers::open_layers;
use crate::args::LayerArguments;
use crate::exit::{Result, VerbFailure};
use crate::session::Access;

struct OpenDisk {
    host: HostId,
    access: Access,
    device: Weak<dyn BlockDevice>,
    layers: Vec<String>,
    snapshots: Vec<String>,
    files: Vec<Metadata>,
}

static OPEN: Mutex<Vec<OpenDisk>> = Mutex::new(Vec::new());

/// Opens the disk in the file at `path`, and returns it with the identity of the file. All calls in
/// one process pass the same image options.
pub(super) fn open(
    path: &Path,
    access: Access,
    arguments: &LayerArguments,
) -> Result<(OpenedDisk, HostId)> {
    let failed = |error| VerbFailure::Host(path.display().to_string(), error);
    let Some(host) = host_id_of_file(path) else {
        return Err(failed(path.metadata().err().unwrap_or_else(not_found)));
    };
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|open| open.device.strong_count() > 0);
    let known = open.iter().filter(|open| open.host == host && open.access >= access);
    for open in known {
        if let Some(device) = open.device.upgrade() {
            let OpenDisk { layers, snapshots, files, .. } = open;
            let (layers, snapshots) = (layers.clone(), snapshots.clone());
            return Ok((OpenedDisk { device, layers, snapshots, files: files.clone() }, host));
        }
    }
    let layered = open_layers(path, access, arguments)?;
    open.push(OpenDisk {
        host,
        access,
        device: Arc::downgrade(&layered.device),
        layers: layered.layers.clone(),
        snapshots: layered.snapshots.clone(),
        files: layered.files.clone(),
    });
    Ok((layered, host))
}

/// The open files, backing files included.
pub(crate) fn open_files() -> Vec<HostId> {
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let used = open.iter().filter(|open| open.device.strong_count() > 0);
    used.flat_map(|open| open.files.iter().map(host_id_of)).collect()
}

fn not_found() -> std::io::Error {
    std::io::ErrorKind::NotFound.into()
}
