//! `offshoot extract`: writes a tree into a directory or an archive.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_transfer as transfer;
use offshoot_transfer::extract::{ExtractOutcome, ExtractSource, Mark, extract, extract_tar};
use offshoot_transfer::host::Process;
use offshoot_vfs::path::{LastLink, climb_file};
use offshoot_vfs::{FileId, VolumeVersion};

use crate::args::ExtractArguments;
use crate::edit::{moment, place_in};
use crate::exit::{ExitStatus, Result, VerbFailure, reported};
use crate::interrupt;
use crate::occupied;
use crate::output::{Console, human_size, write_line};
use crate::place::VolumePath;
use crate::session::PlaceSession;

pub(super) fn run(
    arguments: &ExtractArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let to_stdout = arguments.tar.as_deref() == Some(Path::new("-"));
    if to_stdout && arguments.json {
        return Err(VerbFailure::Usage(
            "--json cannot be used with --tar -, because standard output is the archive".into(),
        ));
    }
    if to_stdout {
        refuse_terminal()?;
    }
    interrupt::watch(console)?;
    let session = PlaceSession::open(&arguments.place, console)?;
    let held = session.file(LastLink::Follow)?;
    let top = held.file();
    let path =
        climb_file(&*session.fs, top, &session.path).map_err(|error| session.named(error))?;
    let path = place_in(&session.volume, &path);
    let source = ExtractSource { fs: &*session.fs, top, path: &path };
    let outcome = match (&arguments.tar, &arguments.destination) {
        (Some(_), _) if to_stdout => {
            extract_tar(&source, &mut *out, &**console).map_err(|failure| match failure {
                transfer::TransferFailure::Archive(error) => VerbFailure::Output(error),
                other => other.into(),
            })?
        }
        (Some(file), _) => {
            refuse_devices(arguments, file)?;
            occupied::refuse(file)?;
            let fail = |error| VerbFailure::Host(file.display().to_string(), error);
            let writer = BufWriter::with_capacity(1 << 20, File::create(file).map_err(fail)?);
            extract_tar(&source, writer, &**console)?
        }
        (None, Some(directory)) => {
            let mark = mark(&session, top);
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
        (None, None) => return Err(VerbFailure::Usage("no destination".into())),
    };
    if interrupt::is_interrupted() {
        console.error(&"interrupted: the archive ends before everything is in it");
        return Err(VerbFailure::Reported(ExitStatus::Failed));
    }
    if arguments.json {
        write_line(out, &outcome)?;
    }
    reported(outcome.worst)
}

/// The mark that says that a directory is being filled from `top` in its current state.
fn mark(session: &PlaceSession, top: FileId) -> Mark {
    let VolumeVersion { volume, state } = session.fs.volume().version();
    Mark {
        place: format!("{volume} {} {}", top.dev, top.ino),
        state: format!("{state}, boot {}", boot()),
    }
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
fn refuse_devices(arguments: &ExtractArguments, file: &Path) -> Result {
    let Ok(target) = file.metadata() else { return Ok(()) };
    let volume = VolumePath::parse(&arguments.place.place).volume;
    for device in std::iter::once(&volume).chain(&arguments.place.tree.open.devices) {
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
