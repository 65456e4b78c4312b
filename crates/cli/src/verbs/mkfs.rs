//! `offshoot mkfs`: make a volume.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{MkfsFeatures, MkfsOptions, mkfs};
use offshoot_device::{BlockDevice, FileDevice};
use offshoot_vfs::{Errno, Error};
use serde::Serialize;
use uuid::Uuid;

use crate::args::MkfsArguments;
use crate::edit::moment;
use crate::exit::{Failure, Result};
use crate::output::{human_size, write_line};

/// What was made.
#[derive(Serialize)]
struct Made {
    uuid: Uuid,
    total_bytes: u64,
    devices: Vec<String>,
}

pub(super) fn run(arguments: &MkfsArguments, out: &mut dyn Write) -> Result {
    let options = options(arguments)?;
    let mut images = NewImages::default();
    let mut devices: Vec<Arc<dyn BlockDevice>> = Vec::new();
    for path in &arguments.devices {
        devices.push(Arc::new(images.open(path, arguments.size)?));
    }
    let uuid = mkfs(&devices, &options).map_err(usage)?;
    images.keep();
    let made = Made {
        uuid,
        total_bytes: devices.iter().map(|device| device.size_bytes()).sum(),
        devices: devices.iter().map(|device| device.name().to_owned()).collect(),
    };
    if arguments.json {
        return Ok(write_line(out, &made)?);
    }
    let over = match made.devices.len() {
        1 => String::new(),
        count => format!(" on {count} devices"),
    };
    writeln!(out, "made volume {uuid}, {}{over}", human_size(made.total_bytes))?;
    Ok(())
}

fn options(arguments: &MkfsArguments) -> Result<MkfsOptions> {
    let mut features = MkfsFeatures::default();
    for list in &arguments.features {
        features.apply(list).map_err(usage)?;
    }
    let fsid = arguments.uuid.unwrap_or_else(Uuid::new_v4);
    Ok(MkfsOptions {
        label: arguments.label.clone(),
        node_size: arguments.nodesize,
        checksum: arguments.csum,
        metadata: arguments.metadata,
        data: arguments.data,
        features,
        force: arguments.force,
        // So that a user can write in the volume that he made, when he mounts it.
        root_owner: arguments.root_owner.unwrap_or_else(|| {
            (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
        }),
        ..MkfsOptions::new(fsid, moment()?)
    })
}

/// Options that contradict each other are wrong usage; all else is a failure.
pub(super) fn usage(error: Error) -> Failure {
    match error {
        Error::Posix { what, errno: Errno::INVAL } => Failure::Usage(what),
        other => Failure::Volume(other),
    }
}

/// The image files that did not exist before. They go when no volume was made on them.
#[derive(Default)]
pub(super) struct NewImages<'a>(Vec<&'a Path>);

impl<'a> NewImages<'a> {
    pub(super) fn open(&mut self, path: &'a Path, size: Option<u64>) -> Result<FileDevice> {
        let exists = path.try_exists().unwrap_or(true);
        let device = match size {
            Some(size_bytes) => FileDevice::create(path, size_bytes),
            None if !exists => {
                let path = path.display();
                return Err(Failure::Usage(format!("{path} does not exist; make it with --size")));
            }
            None => FileDevice::open_writable(path),
        };
        let device = device.map_err(|e| Failure::Host(path.display().to_string(), e))?;
        if !exists {
            self.0.push(path);
        }
        Ok(device)
    }

    pub(super) fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for NewImages<'_> {
    fn drop(&mut self) {
        for path in &self.0 {
            // The failure that led here is what the user has to know of.
            let _ = std::fs::remove_file(path);
        }
    }
}
