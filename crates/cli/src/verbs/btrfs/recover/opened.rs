//! The devices of a volume to recover, and the volume on them, which several roots may open.
//!
//! Without a sound superblock on one of the devices the engine searches all of them, once. What it
//! makes is in files without names, so nothing is written to the devices.

use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsVolume, CheckEvent, CheckOptions, FoundVolume, Reporter, Rescue, ScanOptions, find_volume,
};
use offshoot_device::BlockDevice;
use offshoot_vfs::Errno;
use serde_json::Value;

use crate::args::RecoverArguments;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt::is_interrupted;
use crate::output::Console;
use crate::session::{Access, Opening, Session};
use crate::verbs::btrfs::check::show_progress;
use crate::verbs::btrfs::scanned;

/// The open devices of a volume.
pub(super) struct RecoverSource<'a> {
    pub(super) arguments: &'a RecoverArguments,
    /// The devices as the volume is read from them.
    devices: Vec<Arc<dyn BlockDevice>>,
    /// What the search found; `None` without one.
    found: Option<FoundVolume>,
}

impl<'a> RecoverSource<'a> {
    /// Opens the devices, and searches them if there is need.
    pub(super) fn open(arguments: &'a RecoverArguments, console: &Arc<Console>) -> Result<Self> {
        let place = (&*arguments.volume, &arguments.open);
        let devices = Session::devices_of(Access::Read, place, console)?;
        let options =
            CheckOptions { is_degraded: arguments.open.degraded, ..CheckOptions::default() };
        let progress = console.start_progress("searched");
        let watch = |event: &CheckEvent| show_progress(event, &progress);
        let scan = ScanOptions { fsid: arguments.fsid };
        let found = find_volume(&devices, scan, &options, &watch);
        console.stop_progress();
        let found = found.map_err(|error| {
            if error.errno() == Errno::INTR && is_interrupted() {
                console.error(&"interrupted: nothing was read yet");
                return VerbFailure::Reported(ExitStatus::Failed);
            }
            scanned::failure(&arguments.volume, error)
        })?;
        let Some(found) = found else { return Ok(Self { arguments, devices, found: None }) };
        console.warning(
            &"not all devices have a sound superblock: one is made from what a search of all \
              devices has found, and nothing is written to them",
        );
        for line in scanned::in_words(&found.outcome) {
            console.warning(&format_args!("found: {line}"));
        }
        if !found.is_whole {
            console.warning(
                &"the volume is not whole: chunks and the root are the newest that were found; \
                  --list-roots shows others",
            );
        }
        Ok(Self { arguments, devices: found.devices.clone(), found: Some(found) })
    }

    /// Opens the volume.
    pub(super) fn volume(
        &self,
        rescue: Rescue,
        told: Reporter,
        console: &Arc<Console>,
    ) -> Result<Arc<BtrfsVolume>> {
        let opening = Opening { rescue, told: Some(told), ..Opening::to(Access::Read) };
        let open = &self.arguments.open;
        let opened = Session::open_to_read(self.devices.clone(), open, opening, console);
        if let (Err(_), Some(_)) = (&opened, self.arguments.generation) {
            console.step("`offshoot recover --list-roots` shows the generations that are there");
        }
        Ok(opened?.volume)
    }

    /// Whether a search found less than the last commit.
    pub(super) fn is_in_part(&self) -> bool {
        let is_in_part = |found: &FoundVolume| {
            !found.is_whole || found.outcome.newest > found.outcome.generation
        };
        self.found.as_ref().is_some_and(is_in_part)
    }

    /// What the search found, as JSON: null without one.
    pub(super) fn as_json(&self) -> Value {
        self.found.as_ref().map_or(Value::Null, |found| scanned::as_json(&found.outcome))
    }
}
