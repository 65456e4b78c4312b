//! `offshoot recover`: gets out of a damaged volume what can be read.
//!
//! The engine reads through the newest usable root, past blocks that cannot be read, and with zeros
//! for data that no copy gives. The rest is an extraction.

mod deleted;
mod opened;
mod roots;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use offshoot_btrfs::{RecoveredFiles, Rescue, RootChoice};
use offshoot_btrfs_format::{Generation, Logical, TreeId};
use offshoot_transfer::extract::{ExtractSource, Mark};
use offshoot_vfs::FileSystemMut;
use offshoot_vfs::path::{LastLink, climb_file, resolve};
use serde_json::json;

use super::losses::Losses;
use crate::args::RecoverArguments;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt;
use crate::output::{Console, write_line};
use crate::verbs::extract::{Extraction, ExtractionTarget, place_and_mark, with_losses};
use opened::RecoverSource;

/// The words behind the volume: where the files go, and which.
struct Words {
    target: ExtractionTarget,
    path: Vec<u8>,
}

impl Words {
    fn of(arguments: &RecoverArguments) -> Result<Self> {
        let mut words = arguments.words.iter();
        let target = match &arguments.tar {
            Some(file) => ExtractionTarget::Archive(file.clone()),
            None => {
                ExtractionTarget::Directory(words.next().map(PathBuf::from).ok_or_else(|| {
                    VerbFailure::Usage(
                        "name a directory to write into, or an archive with --tar".to_owned(),
                    )
                })?)
            }
        };
        let path = words.next().map(|path: &OsString| path.as_bytes().to_vec()).unwrap_or_default();
        match words.next() {
            None => Ok(Self { target, path }),
            Some(_) => Err(VerbFailure::Usage("there is one path too many".to_owned())),
        }
    }
}

pub(in crate::verbs) fn run(
    arguments: &RecoverArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    interrupt::watch(console)?;
    if arguments.list_roots {
        return roots::list_roots(arguments, out, console);
    }
    let words = Words::of(arguments)?;
    words.target.require_json_elsewhere(arguments.json)?;
    let source = RecoverSource::open(arguments, console)?;
    if let Some(pattern) = &arguments.deleted {
        return deleted::run(&source, pattern, &words, out, console);
    }
    let losses = Arc::new(Losses::default());
    let volume = source.volume(rescue(arguments), losses.reporter(console), console)?;
    let files = RecoveredFiles::open(&volume, TreeId::FS)?;
    let fs = files.read_only();
    let named = |error: offshoot_vfs::Error| VerbFailure::Inside(arguments.volume.clone(), error);
    let top = resolve(&fs, &words.path, LastLink::Follow).map_err(named)?;
    let path = climb_file(&fs, top, &words.path).map_err(named)?;
    let (path, mark) = place_and_mark(&arguments.volume, &path, &*volume, top);
    let mark = Mark { state: format!("{}, {}", mark.state, way(arguments)), ..mark };
    let tree = ExtractSource { fs: &fs as &dyn FileSystemMut, top, path: &path };
    let volumes = std::iter::once(&arguments.volume).chain(&arguments.open.devices);
    let extraction =
        Extraction { source: tree, mark, target: &words.target, volumes: volumes.collect() };
    let outcome = extraction.run(out, console)?;
    losses.add_inferred(files.inferred());
    if files.is_cut() {
        console.warning(&"there are more files without names than are kept, and some are left out");
    }
    if arguments.json {
        let mut shown = with_losses(&outcome, Some(losses.json(&|file| files.path_of(file))))?;
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("generation".to_owned(), json!(volume.root_tree().generation.0));
            shown.insert("orphans".to_owned(), json!(files.orphans()));
            shown.insert("scanned".to_owned(), source.as_json());
        }
        write_line(out, &shown)?;
    } else {
        losses.print(&|file| files.path_of(file), console);
    }
    let own = outcome.worst.map_or(ExitStatus::Done, ExitStatus::from);
    // What came after an older root is missing.
    let is_chosen = arguments.generation.is_some() || arguments.root.is_some();
    let is_older = volume.root_tree().generation < volume.superblock().generation;
    let is_older = is_older || source.is_in_part();
    let is_all = losses.is_empty() && (is_chosen || !is_older);
    let lost = if is_all { ExitStatus::Done } else { ExitStatus::Corrupt };
    match own.max(lost) {
        ExitStatus::Done => Ok(()),
        status => Err(VerbFailure::Reported(status)),
    }
}

/// The way in which the volume is read, for the mark of a directory that is half done.
fn way(arguments: &RecoverArguments) -> String {
    let RecoverArguments { generation, root, open, .. } = arguments;
    let words = open.rescue.words().join(" ");
    format!("recovered from generation {generation:?}, root {root:?}, {words}")
}

fn rescue(arguments: &RecoverArguments) -> Rescue {
    let root = match (arguments.generation, arguments.root) {
        (Some(generation), _) => RootChoice::Generation(Generation(generation)),
        (None, Some(address)) => RootChoice::Block(Logical(address)),
        (None, None) => RootChoice::Usable,
    };
    Rescue { root, ..Rescue::EVERYTHING }
}
