//! A volume that is made and filled in its place, with the files of `--rootdir`.
//!
//! A block device has the size that it has. A file that is missing, or smaller than any volume,
//! becomes as large as the files need. One that is large enough for a volume is filled as it is,
//! and made longer only if the files turn out not to fit: callers give a file the size that its
//! place in an image has. With `-b` a file that is longer keeps what lies behind these bytes, so
//! the volume does not become larger.
//!
//! Until it is filled the volume has no default subvolume and may be half full. If filling it
//! fails, its superblocks are wiped, so that no program takes it for a volume, and the file has its
//! old size again.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_btrfs::MkfsOptions;
use offshoot_device::{BlockDevice, FileDevice};
use offshoot_transfer::TransferFailure;
use offshoot_transfer::build::{BuildInput, BuildOptions, BuildSource, FileProperty};
use offshoot_transfer::host::{Process, host_id_of_file};

use super::arguments::DropinArguments;
use super::devices::{NewMember, check, failed, is_block_device, make};
use super::{reflink, summary};
use crate::exit::{ExitStatus, Result, VerbFailure, reported};
use crate::interrupt;
use crate::output::{Console, Escaped};
use crate::verbs::btrfs::build::{LEAST_BYTES, names_of, open_new, size_for_profiles};
use crate::verbs::btrfs::storing::Storing;
use crate::verbs::build::{GROWN_MAX, VolumeFill, fill_options, is_full};
use crate::verbs::mkfs::NewImages;

/// Makes the volume and fills it.
pub(super) fn run(
    arguments: &DropinArguments,
    new: MkfsOptions,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let (Some(rootdir), Some(path)) = (&arguments.rootdir, arguments.devices.first()) else {
        return Ok(());
    };
    let top = source(rootdir)?;
    let subvolumes = arguments.subvolumes()?;
    for subvolume in &subvolumes {
        let (_, metadata) = in_source(&top, "--subvol", subvolume.path())?;
        if !metadata.is_dir() {
            let message = format!("--subvol: {} is no directory", Escaped(subvolume.path()));
            return Err(VerbFailure::Refused(message));
        }
    }
    let mut flags = BTreeMap::new();
    for (path, flag) in arguments.file_flags()? {
        let (path, metadata) = in_source(&top, "--inode-flags", &path)?;
        if !metadata.is_dir() && !metadata.is_file() {
            let message = "is no directory and no regular file, which have flags";
            return Err(VerbFailure::Refused(format!(
                "--inode-flags: {} {message}",
                Escaped(&path)
            )));
        }
        flags.insert(path, flag);
    }
    let is_block = is_block_device(path);
    if arguments.reflink {
        if is_block {
            let message = "--reflink shares blocks between files, and this is a device";
            return Err(VerbFailure::Refused(format!("{}: {message}", path.display())));
        }
        reflink::require_sharing(&top, path)?;
    }
    interrupt::watch(console)?;
    let mut images = NewImages::default();
    if !is_block && !path.exists() {
        // Here the mask of the caller gives a new file its permissions: `Process` sets it to 0.
        drop(images.create(path, 0)?);
    }
    let source = BuildSource::Directory(top.clone());
    let inputs = vec![BuildInput { source, to: Vec::new() }];
    let process = Process::prepare()?;
    let fill = VolumeFill {
        inputs,
        subvolumes,
        snapshots: Vec::new(),
        root_owner: None,
        minimal: arguments.shrink.then_some(0),
        process,
        console,
    };
    let mut options = fill_options()?;
    options.images.extend(host_id_of_file(path));
    for (path, flag) in flags {
        options.add_property(&path, FileProperty::Flags(flag))?;
    }
    let run = FilledRun { arguments, new, path, top: &top, is_block, fill };
    let (device, worst) = run.in_place(&mut images, &mut options)?;
    images.keep();
    match summary::print(arguments, vec![device], out, console) {
        // The volume is good, and what was said of its files counts.
        Err(failure) if failure.is_broken_pipe() => {}
        printed => printed?,
    }
    reported(worst)
}

/// The directory that the files come from.
fn source(rootdir: &Path) -> Result<PathBuf> {
    let top = rootdir.canonicalize().map_err(|error| failed(rootdir, error))?;
    if !top.is_dir() {
        let message = format!("--rootdir: {} is no directory", rootdir.display());
        return Err(VerbFailure::Refused(message));
    }
    Ok(top)
}

/// What `option` names by `path` in the source: its normal path there, and its metadata.
fn in_source(top: &Path, option: &str, path: &[u8]) -> Result<(Vec<u8>, Metadata)> {
    let names: Vec<&[u8]> = names_of(path).collect();
    let normal = names.join(&b'/');
    let found = if names.contains(&&b".."[..]) {
        Err(io::ErrorKind::NotFound.into())
    } else {
        fs::symlink_metadata(top.join(OsStr::from_bytes(&normal)))
    };
    let metadata = found.map_err(|error| {
        VerbFailure::Host(format!("{option}: {} in --rootdir", Escaped(path)), error)
    })?;
    Ok((normal, metadata))
}

/// A volume that is being filled. Dropped before it is finished, it is wiped.
struct Unfinished<'a> {
    member: &'a NewMember,
    is_finished: bool,
}

impl Unfinished<'_> {
    fn finish(mut self) {
        self.is_finished = true;
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            // The user needs to see the first failure, not this one.
            let _ = self.member.wipe();
        }
    }
}

/// One run of the tool.
struct FilledRun<'a> {
    arguments: &'a DropinArguments,
    new: MkfsOptions,
    path: &'a Path,
    /// The source.
    top: &'a Path,
    is_block: bool,
    fill: VolumeFill<'a>,
}

type Filled = (Arc<dyn BlockDevice>, Option<offshoot_transfer::Worst>);

impl<'a> FilledRun<'a> {
    /// Fills the device or file, which may become longer.
    fn in_place(&self, images: &mut NewImages<'a>, options: &mut BuildOptions) -> Result<Filled> {
        let mut size = self.arguments.byte_count;
        let mut is_forced = self.arguments.force;
        let mut may_grow = false;
        if !self.is_block {
            let now = fs::metadata(self.path).map_err(|error| failed(self.path, error))?.len();
            // What lies behind the bytes that `-b` counts stays as it is.
            may_grow = size.is_none_or(|size| size >= now);
            if may_grow && size.unwrap_or(now) < LEAST_BYTES {
                size = Some(self.needed(options)?.max(size.unwrap_or(now)));
            }
        }
        let expected = self.fill.expected(options).map_err(|failure| self.ended(failure))?;
        let mut grown = 0;
        loop {
            let device = self.open(images, size)?;
            let size_bytes = size.unwrap_or(device.size_bytes());
            let member = NewMember::of(self.path, device, size, is_forced)?;
            if grown > 0 {
                member.empty_file()?;
            }
            match self.attempt(&member, options, expected) {
                Err(failure) if grown < GROWN_MAX && may_grow && is_full(&failure) => {
                    // The first time it may be enough to have room for what was measured.
                    let needed = if grown == 0 { self.needed(options)? } else { 0 };
                    let more = if needed > size_bytes { needed } else { size_bytes * 2 };
                    (size, grown, is_forced) = (Some(more), grown + 1, true);
                }
                Err(failure) => return Err(failure),
                Ok(worst) => return Ok((member.device, worst)),
            }
        }
    }

    /// Opens the device, or the file, which becomes at least so long.
    fn open(&self, images: &mut NewImages<'a>, size: Option<u64>) -> Result<FileDevice> {
        if self.is_block {
            return FileDevice::open_writable_for_parent(self.path)
                .map_err(|error| failed(self.path, error));
        }
        let now = fs::metadata(self.path).map_err(|error| failed(self.path, error))?.len();
        images.create(self.path, size.unwrap_or(now).max(now))
    }

    /// The size of a volume that has room for the files.
    fn needed(&self, options: &BuildOptions) -> Result<u64> {
        let size = self.fill.measure(options).map_err(|failure| self.ended(failure))?;
        Ok(size_for_profiles(&size, self.new.data, self.new.metadata))
    }

    /// Makes the volume and fills it. After a failure the device holds none, and it is as it was
    /// when the volume cannot be made there.
    fn attempt(
        &self,
        member: &NewMember,
        options: &mut BuildOptions,
        expected: Option<u64>,
    ) -> Result<Option<offshoot_transfer::Worst>> {
        check(std::slice::from_ref(member), &self.new)?;
        let unfinished = Unfinished { member, is_finished: false };
        make(std::slice::from_ref(member), self.new.clone(), self.arguments)?;
        let storing = Storing::compressed(self.arguments.compression());
        let fresh = open_new(member.device.clone(), storing, self.fill.console)?;
        let outcome = self.fill.fill(fresh, options, expected);
        let outcome = outcome.map_err(|failure| self.ended(failure))?;
        if self.arguments.reflink {
            reflink::share(self.top, self.path, member.device.clone())?;
        }
        if interrupt::is_interrupted() {
            return Err(self.ended(TransferFailure::Interrupted));
        }
        unfinished.finish();
        Ok(outcome.written.worst)
    }

    /// Why it ended, for the user.
    fn ended(&self, failure: TransferFailure) -> VerbFailure {
        if let TransferFailure::Interrupted = failure {
            let path = Escaped(self.path.as_os_str().as_bytes());
            self.fill.console.error(&format_args!("interrupted: {path} holds no volume"));
            return VerbFailure::Reported(ExitStatus::Failed);
        }
        failure.into()
    }
}
