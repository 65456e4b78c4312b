//! `offshoot subvolume`: subvolumes and snapshots.

mod edit;
mod show;

use std::fmt::Display;
use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{Filesystem, SubvolumeId, SubvolumeInfo};
use offshoot_btrfs_format::TreeId;
use offshoot_vfs::{Errno, Error, FileSystem};
use serde::Serialize;

pub(in crate::verbs) use edit::set_read_only;

use offshoot_vfs::path::{LastLink, resolve};

use crate::args::{ListArguments, SubvolumeVerb};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{CivilTime, Console, Escaped, JsonArray, json_name};
use crate::session::Session;

#[derive(Serialize)]
struct Json {
    id: u64,
    parent: Option<u64>,
    /// Absent if the directories above cannot be read.
    path: Option<String>,
    generation: u64,
    created_generation: u64,
    created: String,
    read_only: bool,
    is_default: bool,
    uuid: Option<String>,
    parent_uuid: Option<String>,
    received_uuid: Option<String>,
}

impl Json {
    fn new(info: &SubvolumeInfo, is_default: bool) -> Self {
        let text = |uuid: Option<uuid::Uuid>| uuid.map(|uuid| uuid.to_string());
        Self {
            id: info.id.0,
            parent: info.parent.map(|parent| parent.0),
            path: info.path.as_deref().ok().map(json_name),
            generation: info.generation.0,
            created_generation: info.created_generation.0,
            created: info.created.decimal(),
            read_only: info.is_read_only,
            is_default,
            uuid: text(info.uuid),
            parent_uuid: text(info.parent_uuid),
            received_uuid: text(info.received_uuid),
        }
    }
}

pub(in crate::verbs) fn run(
    verb: &SubvolumeVerb,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    match verb {
        SubvolumeVerb::List(arguments) => list(arguments, out, console),
        SubvolumeVerb::Show(arguments) => show::show(arguments, out, console),
        SubvolumeVerb::Create(arguments) => edit::create(arguments, console),
        SubvolumeVerb::Snapshot(arguments) => edit::snapshot(arguments, console),
        SubvolumeVerb::Delete(arguments) => edit::delete(arguments, console),
        SubvolumeVerb::GetDefault(arguments) => show::get_default(arguments, out, console),
        SubvolumeVerb::SetDefault(arguments) => edit::set_default(arguments, console),
        SubvolumeVerb::Get(arguments) => show::get(arguments, out, console),
        SubvolumeVerb::Set(arguments) => edit::set(arguments, console),
    }
}

/// The subvolume whose root is at `path`.
pub(super) fn subvolume_at(fs: &Filesystem, path: &[u8]) -> Result<SubvolumeId, Error> {
    let file = resolve(fs, path, LastLink::Follow)?;
    let id = TreeId(file.dev);
    if fs.volume().filesystem(id)?.root() != file {
        let what = format!("{} is no subvolume", Escaped(path));
        return Err(Error::posix(Errno::INVAL, what));
    }
    Ok(id)
}

fn list(arguments: &ListArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let session = Session::open(&arguments.info.volume, console)?;
    let mut errors = Errors { console, status: None };
    let default = errors.note(session.volume.default_subvolume());
    let mut subvolumes = session.volume.subvolumes();
    let mut next = || loop {
        // A subvolume that cannot be read is reported, and the list goes on.
        match subvolumes.next()? {
            Ok(info) => {
                if let Err(error) = &info.path {
                    errors.report(&format_args!("subvolume {}: {error}", info.id), error);
                }
                return Some(info);
            }
            Err(error) => errors.report(&error, &error),
        }
    };
    if arguments.info.json {
        let mut array = JsonArray::new(out)?;
        while let Some(info) = next() {
            array.push(&Json::new(&info, Some(info.id) == default))?;
        }
        array.finish()?;
    } else {
        let columns = UuidColumns::of(arguments);
        write!(
            out,
            "{:>6} {:>6} {:>10}  {:16}  {:9}  ",
            "ID", "PARENT", "GENERATION", "CREATED", "FLAGS"
        )?;
        columns.write(out, ["UUID", "PARENT UUID", "RECEIVED UUID"])?;
        writeln!(out, "PATH")?;
        while let Some(info) = next() {
            write_line(out, &info, Some(info.id) == default, columns)?;
        }
    }
    errors.result()
}

fn flags(info: &SubvolumeInfo, is_default: bool) -> String {
    let mut flags = Vec::new();
    flags.extend(info.is_read_only.then_some("ro"));
    flags.extend(info.parent_uuid.map(|_| "snap"));
    flags.extend(is_default.then_some("default"));
    if flags.is_empty() { "-".to_owned() } else { flags.join(",") }
}

/// Which UUIDs are shown: that of the subvolume, of its snapshot source, and of the subvolume from
/// which it was received.
#[derive(Clone, Copy)]
struct UuidColumns([bool; 3]);

impl UuidColumns {
    fn of(arguments: &ListArguments) -> Self {
        Self([arguments.uuid, arguments.parent_uuid, arguments.received_uuid])
    }

    fn write(self, out: &mut dyn Write, texts: [&str; 3]) -> Result {
        for (is_shown, text) in self.0.into_iter().zip(texts) {
            if is_shown {
                write!(out, "{text:36}  ")?;
            }
        }
        Ok(())
    }
}

fn write_line(
    out: &mut dyn Write,
    info: &SubvolumeInfo,
    is_default: bool,
    columns: UuidColumns,
) -> Result {
    let parent = info.parent.map_or("-".to_owned(), |parent| parent.to_string());
    let flags = flags(info, is_default);
    write!(
        out,
        "{:>6} {parent:>6} {:>10}  {:#}  {flags:9}  ",
        info.id.0,
        info.generation.0,
        CivilTime(info.created)
    )?;
    let text = |uuid: Option<uuid::Uuid>| uuid.map_or("-".to_owned(), |uuid| uuid.to_string());
    let uuids = [info.uuid, info.parent_uuid, info.received_uuid].map(text);
    columns.write(out, uuids.each_ref().map(String::as_str))?;
    match &info.path {
        Ok(path) => writeln!(out, "/{}", Escaped(path))?,
        Err(_) => writeln!(out, "?")?,
    }
    Ok(())
}

/// Collects and reports errors. The worst one decides the exit code.
struct Errors<'a> {
    console: &'a Console,
    status: Option<ExitStatus>,
}

impl Errors<'_> {
    fn report(&mut self, text: &dyn Display, error: &Error) {
        self.status = self.status.max(Some(ExitStatus::of(error)));
        self.console.error(text);
    }

    fn note<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        result.map_err(|error| self.report(&error, &error)).ok()
    }

    fn result(&self) -> Result {
        self.status.map_or(Ok(()), |status| Err(VerbFailure::Reported(status)))
    }
}
