//! `offshoot extract`: writes a tree into a directory or an archive.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_btrfs::Filesystem;
use offshoot_transfer as transfer;
use offshoot_transfer::Worst;
use offshoot_transfer::extract::{ExtractOutcome, ExtractSource, Mark, extract, extract_tar};
use offshoot_transfer::host::Process;
use offshoot_vfs::path::{LastLink, climb_file};
use offshoot_vfs::{FileId, Volume, VolumeVersion};
use serde_json::Value;

use crate::args::ExtractArguments;
use crate::edit::{moment, place_in};
use crate::exit::{ExitStatus, Result, VerbFailure, reported, show_steps};
use crate::interrupt;
use crate::occupied;
use crate::output::{Console, human_size, write_line};
use crate::place::VolumePath;
use crate::session::{Access, Opening, PlaceSession};
use crate::verbs::btrfs::losses::Losses;

/// Where an extraction goes.
pub(super) enum ExtractionTarget {
    /// A directory.
    Directory(PathBuf),
    /// An archive; `-` is standard output.
    Archive(PathBuf),
}

impl ExtractionTarget {
    fn is_stdout(&self) -> bool {
        matches!(self, Self::Archive(file) if file == Path::new("-"))
    }

    /// Refuses JSON on standard output when the archive goes there, and an archive on a terminal.
    pub(super) fn require_json_elsewhere(&self, is_json: bool) -> Result {
        if self.is_stdout() && is_json {
            return Err(VerbFailure::Usage(
                "--json cannot be used with --tar -, because standard output is the archive".into(),
            ));
        }
        if self.is_stdout() { refuse_terminal() } else { Ok(()) }
    }
}

/// An extraction that is about to begin.
pub(super) struct Extraction<'a> {
    pub(super) source: ExtractSource<'a>,
    pub(super) mark: Mark,
    pub(super) target: &'a ExtractionTarget,
    /// The files and devices of the volume, which must not be overwritten.
    pub(super) volumes: Vec<&'a PathBuf>,
}

impl Extraction<'_> {
    /// Extracts. An interrupted extraction is a failure, which is told here.
    pub(super) fn run(self, out: &mut dyn Write, console: &Arc<Console>) -> Result<ExtractOutcome> {
        let Self { source, mark, target, volumes } = self;
        let outcome = match target {
            ExtractionTarget::Archive(_) if target.is_stdout() => {
                extract_tar(&source, &mut *out, &**console).map_err(|failure| match failure {
                    transfer::TransferFailure::Archive(error) => VerbFailure::Output(error),
                    other => other.into(),
                })?
            }
            ExtractionTarget::Archive(file) => {
                refuse_devices(&volumes, file)?;
                occupied::refuse(file)?;
                let fail = |error| VerbFailure::Host(file.display().to_string(), error);
                let writer = BufWriter::with_capacity(1 << 20, File::create(file).map_err(fail)?);
                extract_tar(&source, writer, &**console)?
            }
            ExtractionTarget::Directory(directory) => {
                let process = Process::prepare()?;
                let outcome = extract(&source, directory, &mark, moment()?, process, &**console)?;
                if interrupt::is_interrupted() {
                    let ExtractOutcome { files, bytes, .. } = outcome;
                    let (bytes, directory) = (human_size(bytes), directory.display());
                    console.error(&format_args!(
                        "interrupted: {files} files, {bytes}, are in {directory}"
                    ));
                    console.detail(&"what was begun and not ended is not there");
                    console.detail(&"the same command once more goes on where this one ended");
                    return Err(VerbFailure::Reported(ExitStatus::Failed));
                }
                outcome
            }
        };
        if interrupt::is_interrupted() {
            console.error(&"interrupted: the archive ends before everything is in it");
            return Err(VerbFailure::Reported(ExitStatus::Failed));
        }
        Ok(outcome)
    }
}

pub(super) fn run(
    arguments: &ExtractArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let target = match (&arguments.tar, &arguments.destination) {
        (Some(file), _) => ExtractionTarget::Archive(file.clone()),
        (None, Some(directory)) => ExtractionTarget::Directory(directory.clone()),
        (None, None) => return Err(VerbFailure::Usage("no destination".into())),
    };
    target.require_json_elsewhere(arguments.json)?;
    interrupt::watch(console)?;
    let losses = Arc::new(Losses::default());
    let mut opening = Opening::to(Access::Read);
    if arguments.salvage {
        opening.rescue.replaces_bad_data = true;
        opening.told = Some(losses.reporter(console));
    }
    let session = PlaceSession::open_with(&arguments.place, opening, console)?;
    let held = session.file(LastLink::Follow)?;
    let top = held.file();
    let path =
        climb_file(&*session.fs, top, &session.path).map_err(|error| session.named(error))?;
    let (path, mark) = place_and_mark(&session.volume, &path, &*session.fs.volume(), top);
    let source = ExtractSource { fs: &*session.fs, top, path: &path };
    let named = VolumePath::parse(&arguments.place.place).volume;
    let volumes = std::iter::once(&named).chain(&arguments.place.tree.open.devices).collect();
    let outcome = Extraction { source, mark, target: &target, volumes }.run(out, console)?;
    let volume = session.fs.btrfs("--salvage").ok().map(Filesystem::volume);
    if arguments.json {
        let lost = volume
            .filter(|_| arguments.salvage)
            .map(|volume| losses.json(&|file| volume.path_of(file)));
        write_line(out, &with_losses(&outcome, lost)?)?;
    } else if let Some(volume) = volume {
        losses.print(&|file| volume.path_of(file), console);
    }
    if !arguments.salvage {
        show_steps(outcome.worst, console);
    }
    reported(outcome.worst.max((!losses.is_empty()).then_some(Worst::Corrupt)))
}

/// The outcome as JSON, with what was lost if there is a list of it.
pub(super) fn with_losses(outcome: &ExtractOutcome, lost: Option<Value>) -> Result<Value> {
    let mut shown = serde_json::to_value(outcome)?;
    if let (Some(shown), Some(Value::Object(lost))) = (shown.as_object_mut(), lost) {
        shown.extend(lost);
    }
    Ok(shown)
}

/// The path of a place with its volume, and the mark that says that a directory is being filled
/// from `top` in its current state.
pub(super) fn place_and_mark(
    volume: &Path,
    path: &[u8],
    opened: &dyn Volume,
    top: FileId,
) -> (Vec<u8>, Mark) {
    let VolumeVersion { volume: id, state } = opened.version();
    let mark = Mark {
        place: format!("{id} {} {}", top.dev, top.ino),
        state: format!("{state}, boot {}", boot()),
    };
    (place_in(volume, path), mark)
}

/// The id of this boot of the host. After a crash of the host, a file extracted before may have its
/// size and time on the disk, and not its data.
fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Refuses to write an archive to a terminal.
fn refuse_terminal() -> Result {
    if io::stdout().is_terminal() {
        let what = "an archive is not written to a terminal: write it to a file (--tar FILE) or into a pipe";
        return Err(VerbFailure::Refused(what.to_owned()));
    }
    Ok(())
}

/// Refuses to overwrite the volume itself.
fn refuse_devices(volumes: &[&PathBuf], file: &Path) -> Result {
    let Ok(target) = file.metadata() else { return Ok(()) };
    for device in volumes {
        let is_same = device.metadata().is_ok_and(|device| {
            (device.dev(), device.ino()) == (target.dev(), target.ino())
                || (device.rdev() != 0 && device.rdev() == target.rdev())
        });
        if is_same {
            let message = format!("{} is a device of the volume", file.display());
            return Err(VerbFailure::Usage(message));
        }
    }
    Ok(())
}
