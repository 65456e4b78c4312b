//! Several places on one command line.
//!
//! If one place fails, the others are still processed. The failure is reported when its turn comes,
//! and the worst failure decides the exit code. A path may be a pattern that matches several files
//! of its volume ([`offshoot_vfs::globs`]). Messages begin with the volume.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_vfs::globs::expand;

use crate::args::{PlacesArguments, TreeArguments};
use crate::exit::{ExitStatus, InVolume, Result, VerbFailure};
use crate::output::Console;
use crate::place::VolumePath;
use crate::session::{Access, OpenTree, Opening, PlaceSession, open_tree};

/// The places of a verb that takes several. Each volume is opened once.
pub(crate) struct VolumePaths<'a> {
    /// The places that are left, the next one last.
    todo: Vec<VolumePath>,
    /// The files that match the pattern of the current place and are left, the next one last.
    matches: Vec<PlaceSession>,
    tree: &'a TreeArguments,
    console: &'a Arc<Console>,
    opened: Vec<(PathBuf, OpenTree)>,
}

impl<'a> VolumePaths<'a> {
    /// The places in `arguments`. None of them is opened yet.
    pub(crate) fn new(arguments: &'a PlacesArguments, console: &'a Arc<Console>) -> Self {
        let mut todo: Vec<VolumePath> =
            arguments.places.iter().map(|text| arguments.tree.open.place(text)).collect();
        todo.reverse();
        Self { todo, matches: Vec::new(), tree: &arguments.tree, console, opened: Vec::new() }
    }

    /// Whether the places are in several volumes, so that a path alone is ambiguous.
    pub(crate) fn are_in_several_volumes(&self) -> bool {
        self.todo.windows(2).any(|pair| pair[0].volume != pair[1].volume)
    }

    /// Opens the next place.
    pub(crate) fn next(&mut self) -> Option<Result<PlaceSession>> {
        if let Some(session) = self.matches.pop() {
            return Some(Ok(session));
        }
        let place = self.todo.pop()?;
        Some(self.open(place))
    }

    fn open(&mut self, VolumePath { volume, path }: VolumePath) -> Result<PlaceSession> {
        let known = self.opened.iter().find(|(opened, _)| *opened == volume);
        let fs = if let Some((_, fs)) = known {
            fs.clone()
        } else {
            let fs = open_tree(&volume, self.tree, Opening::to(Access::Read), self.console)?;
            self.opened.push((volume.clone(), fs.clone()));
            fs
        };
        let paths =
            expand(&*fs, &path).map_err(|error| VerbFailure::Inside(volume.clone(), error))?;
        let session = |path| PlaceSession { volume: volume.clone(), fs: fs.clone(), path };
        self.matches.extend(paths.into_iter().rev().map(session));
        // A pattern matches at least one path.
        self.matches.pop().ok_or_else(|| VerbFailure::Usage("a pattern without files".into()))
    }
}

/// Collects the failures at some of several places.
pub(crate) struct Failures<'a> {
    console: &'a Console,
    status: Option<ExitStatus>,
}

impl<'a> Failures<'a> {
    /// No failure yet.
    pub(crate) fn new(console: &'a Console) -> Self {
        Self { console, status: None }
    }

    /// Prints a failure whose message says where it happened.
    pub(crate) fn opening(&mut self, failure: &VerbFailure) {
        self.note(failure.status());
        failure.print(self.console);
    }

    /// Prints an error in a volume.
    pub(crate) fn inside(&mut self, volume: &Path, status: ExitStatus, text: &dyn Display) {
        self.note(status);
        self.console.failure(status, &InVolume(volume, text));
    }

    /// Records an error without printing it.
    pub(crate) fn note(&mut self, status: ExitStatus) {
        // The worst status wins.
        self.status = self.status.max(Some(status));
    }

    /// The result of the verb.
    pub(crate) fn result(&self) -> Result {
        self.status.map_or(Ok(()), |status| Err(VerbFailure::Reported(status)))
    }
}
