//! `offshoot recover --deleted`: files that older roots show.
//!
//! The roots of older commits are looked through from the newest to the oldest. The files that one
//! shows first go to a directory that is named by its generation.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use offshoot_btrfs::{DeletedFiles, DeletedSearch, Rescue, RootChoice};
use offshoot_transfer::extract::{ExtractSource, Mark};
use offshoot_vfs::path::{LastLink, climb_file, resolve};
use offshoot_vfs::wildcard::Pattern;
use offshoot_vfs::{FileSystem as _, ReadOnlyFiles};
use serde_json::json;

use super::Words;
use super::opened::RecoverSource;
use crate::args::RecoverArguments;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt::is_interrupted;
use crate::output::{Console, write_line};
use crate::verbs::btrfs::losses::Losses;
use crate::verbs::extract::{Extraction, ExtractionTarget, place_and_mark, with_losses};

/// How an older root is read. What is not there any more was overwritten since, so nothing is
/// searched for.
fn older(root: RootChoice) -> Rescue {
    Rescue { root, scans: false, ..Rescue::EVERYTHING }
}

/// Extracts what older roots show and the volume as it is now does not.
pub(super) fn run(
    source: &RecoverSource<'_>,
    pattern: &OsStr,
    words: &Words,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let arguments = source.arguments;
    let ExtractionTarget::Directory(top) = &words.target else {
        return Err(VerbFailure::Usage("--deleted writes into a directory".to_owned()));
    };
    let is_wanted = wanted(pattern, &words.path);
    let losses = Arc::new(Losses::default());
    let rescue = Rescue { root: RootChoice::Usable, ..Rescue::EVERYTHING };
    let present = source.volume(rescue, losses.reporter(console), console)?;
    let newest = present.root_tree().generation;
    let mut search = DeletedSearch::new(present.clone())?;
    let mut worst = ExitStatus::Done;
    let mut has_some = false;
    for (found_root, is_readable) in present.roots() {
        if !is_readable || found_root.root.generation >= newest || is_interrupted() {
            continue;
        }
        let losses = Arc::new(Losses::default());
        let rescue = older(RootChoice::Block(found_root.root.logical));
        let opened = source.volume(rescue, losses.quiet_reporter(), console);
        let found = opened.and_then(|volume| Ok((search.in_root(&volume, &is_wanted)?, volume)));
        let (files, volume) = match found {
            Ok((Some(files), volume)) => (files, volume),
            Ok((None, _)) => continue,
            Err(failure) => {
                let generation = found_root.root.generation;
                console.warning(&format_args!("the root of generation {generation}: {failure}"));
                continue;
            }
        };
        has_some = true;
        // What the walk could not read is not of these files.
        losses.forget();
        let generation = found_root.root.generation.0;
        let target = ExtractionTarget::Directory(top.join(format!("generation-{generation}")));
        let outcome = extract(arguments, &volume, &files, &target, top, out, console)?;
        if arguments.json {
            let mut shown = with_losses(&outcome, Some(losses.json(&|file| volume.path_of(file))))?;
            if let Some(shown) = shown.as_object_mut() {
                shown.insert("generation".to_owned(), json!(generation));
                shown.insert("deleted".to_owned(), json!(files.count()));
            }
            write_line(out, &shown)?;
        } else {
            writeln!(out, "generation {generation}: {} deleted files", files.count())?;
            losses.print(&|file| volume.path_of(file), console);
        }
        worst = worst.max(outcome.worst.map_or(ExitStatus::Done, ExitStatus::from));
        if !losses.is_empty() {
            worst = worst.max(ExitStatus::Corrupt);
        }
    }
    if !has_some {
        console.note(&"no root that is still there shows a file that is not there now");
    }
    if worst == ExitStatus::Done { Ok(()) } else { Err(VerbFailure::Reported(worst)) }
}

/// Whether a file at a path is one of those that the user means: `pattern` is compared with its
/// name, or with its path if it has a slash. It is at `below` or below it.
fn wanted(pattern: &OsStr, below: &[u8]) -> impl Fn(&[u8]) -> bool {
    let has_path = pattern.as_bytes().contains(&b'/');
    let text = pattern.as_bytes();
    let pattern = Pattern::new(text.strip_prefix(b"/").unwrap_or(text));
    let below = below.strip_prefix(b"/").unwrap_or(below);
    let below = below.strip_suffix(b"/").unwrap_or(below).to_vec();
    move |path: &[u8]| {
        let rest = path.strip_prefix(&below[..]);
        let is_below =
            rest.is_some_and(|rest| below.is_empty() || rest.is_empty() || rest.starts_with(b"/"));
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        is_below && pattern.matches(if has_path { path } else { name })
    }
}

fn extract(
    arguments: &RecoverArguments,
    volume: &Arc<offshoot_btrfs::BtrfsVolume>,
    files: &Arc<DeletedFiles>,
    target: &ExtractionTarget,
    top: &PathBuf,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result<offshoot_transfer::extract::ExtractOutcome> {
    std::fs::create_dir_all(top)
        .map_err(|error| VerbFailure::Host(top.display().to_string(), error))?;
    let fs = ReadOnlyFiles::new(files.clone());
    let root = resolve(&fs, b"", LastLink::Follow)?;
    let path = climb_file(&fs, root, b"")?;
    let (path, mark) = place_and_mark(&arguments.volume, &path, &**volume, root);
    let generation = volume.root_tree().generation;
    let mark = Mark { state: format!("{}, deleted in {generation}", mark.state), ..mark };
    let source = ExtractSource { fs: &fs, top: fs.root(), path: &path };
    let volumes = std::iter::once(&arguments.volume).chain(&arguments.open.devices);
    Extraction { source, mark, target, volumes: volumes.collect() }.run(out, console)
}
