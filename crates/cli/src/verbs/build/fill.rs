//! Filling a volume that was just made: the image of `offshoot build`, or the device of
//! `mkfs.btrfs`.

use std::io::{self, IsTerminal};
use std::sync::Arc;

use offshoot_btrfs::Filesystem;
use offshoot_transfer::TransferFailure;
use offshoot_transfer::build::{
    BuildInput, BuildOptions, BuildOutcome, BuildTarget, Snapshots, SourceSize, build,
    measure_sources,
};
use offshoot_transfer::host::Process;
use offshoot_vfs::{self as vfs, Errno, FileSystemMut, NewFile, SetAttr, Volume};

use crate::edit::{moment, source_date};
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::verbs::btrfs;
use crate::verbs::btrfs::build::{NewSnapshot, NewSubvolume, VolumeSnapshots};

/// How often a build starts again with a larger volume.
pub(in crate::verbs) const GROWN_MAX: u32 = 4;

/// A new volume that is open.
pub(in crate::verbs) struct FreshVolume {
    pub(in crate::verbs) volume: Arc<dyn Volume>,
    /// Its files.
    pub(in crate::verbs) files: Box<dyn FileSystemMut>,
    /// The same with what only btrfs has.
    pub(in crate::verbs) btrfs: Option<Filesystem>,
}

/// What a new volume is filled with.
pub(in crate::verbs) struct VolumeFill<'a> {
    /// The sources, and where in the volume each is built.
    pub(in crate::verbs) inputs: Vec<BuildInput>,
    /// The subvolumes of btrfs among the directories.
    pub(in crate::verbs) subvolumes: Vec<NewSubvolume>,
    /// The snapshots that are taken of what was built.
    pub(in crate::verbs) snapshots: Vec<NewSnapshot>,
    /// The owner of the root directory, instead of that which the sources say.
    pub(in crate::verbs) root_owner: Option<(u32, u32)>,
    /// The volume becomes as small as it can be, and so many bytes longer.
    pub(in crate::verbs) minimal: Option<u64>,
    pub(in crate::verbs) process: Process,
    pub(in crate::verbs) console: &'a Arc<Console>,
}

/// Everything as the sources have it, at the time that the environment sets, or now.
pub(in crate::verbs) fn fill_options() -> Result<BuildOptions> {
    let mut options = BuildOptions::new(moment()?);
    options.latest = source_date()?;
    options.finds_zeros = options.latest.is_some();
    Ok(options)
}

/// Whether the volume was too small. A full disk of the host is an error of a device, and a larger
/// volume does not help against it.
pub(in crate::verbs) fn is_full(failure: &VerbFailure) -> bool {
    matches!(failure, VerbFailure::Volume(vfs::Error::Posix { errno: Errno::NOSPC, .. }))
}

impl VolumeFill<'_> {
    /// How much the sources hold.
    pub(in crate::verbs) fn measure(
        &self,
        options: &BuildOptions,
    ) -> Result<SourceSize, TransferFailure> {
        measure_sources(&self.inputs, options, self.process, &**self.console)
    }

    /// How many bytes of data come, if there is a progress line that shows it, and counting them
    /// costs little.
    pub(in crate::verbs) fn expected(
        &self,
        options: &BuildOptions,
    ) -> Result<Option<u64>, TransferFailure> {
        let is_known = self.inputs.iter().all(|input| input.source.is_directory());
        if !io::stderr().is_terminal() || !is_known {
            return Ok(None);
        }
        self.measure(options).map(|size| Some(size.data_bytes))
    }

    /// Fills the volume, makes everything durable and ends its use. `expected` is how many bytes of
    /// data that will be, if it is known.
    pub(in crate::verbs) fn fill(
        &self,
        fresh: FreshVolume,
        options: &mut BuildOptions,
        expected: Option<u64>,
    ) -> Result<BuildOutcome, TransferFailure> {
        options.xattr_bytes_max = fresh.btrfs.as_ref().map(btrfs::build::xattr_bytes_max);
        let (uid, gid) = options.missing_owner();
        let new = NewFile { permissions: 0o755, uid, gid, umask: None, at: options.at };
        if let Some(tree) = &fresh.btrfs {
            btrfs::build::make_subvolumes(tree, &self.subvolumes, &new)?;
        }
        let snapshots = fresh.btrfs.as_ref().map(VolumeSnapshots);
        let snapshots = snapshots.as_ref().map(|snapshots| snapshots as &dyn Snapshots);
        let target = BuildTarget { fs: &*fresh.files, snapshots };
        let (inputs, console) = (&self.inputs, &**self.console);
        let outcome = build(&target, inputs, options, self.process, console, expected)?;
        // That of the options counts before that of the sources.
        if let Some((uid, gid)) = self.root_owner {
            let set = SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() };
            fresh.files.set_attr(fresh.files.root(), &set, options.at)?;
        }
        if let Some(tree) = &fresh.btrfs {
            // Before subvolumes are read-only in which snapshots are made.
            self.snapshots.iter().try_for_each(|snapshot| snapshot.take(tree, &new))?;
            btrfs::build::settle_subvolumes(tree, &self.subvolumes, options.at)?;
        }
        let FreshVolume { volume, files, btrfs } = fresh;
        let made = files.sync().and_then(|()| match (&btrfs, self.minimal) {
            (Some(tree), Some(slack)) => btrfs::build::make_minimal(tree, slack),
            _ => Ok(()),
        });
        made.and(volume.shut_down())?;
        Ok(outcome)
    }
}
