//! Several places on one command line.
//!
//! A place that fails does not keep the others back: it is reported when its turn comes, and
//! the worst of what happened decides the exit code. A path may be a pattern, which stands for
//! several files of its volume ([`offshoot_vfs::globs`]). Messages begin with the volume.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_vfs::globs::expand;

use crate::args::{PlacesArguments, TreeArguments};
use crate::exit::{ExitStatus, Failure, InVolume, Result};
use crate::output::Console;
use crate::place::Place;
use crate::session::{Access, OpenTree, Opening, PlaceSession, open_tree};

/// The places of a verb that takes several. Each volume is opened once.
pub(crate) struct Places<'a> {
    /// Those that are still to come, the next one last.
    todo: Vec<Place>,
    /// What the pattern of the last one stands for, and is still to come, the next one last.
    matches: Vec<PlaceSession>,
    tree: &'a TreeArguments,
    console: &'a Arc<Console>,
    opened: Vec<(PathBuf, OpenTree)>,
}

impl<'a> Places<'a> {
    /// The places in `arguments`, none of them opened yet.
    pub(crate) fn new(arguments: &'a PlacesArguments, console: &'a Arc<Console>) -> Self {
        let mut todo: Vec<Place> =
            arguments.places.iter().map(|text| arguments.tree.open.place(text)).collect();
        todo.reverse();
        Self { todo, matches: Vec::new(), tree: &arguments.tree, console, opened: Vec::new() }
    }

    /// Whether paths alone do not tell the places apart.
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

    fn open(&mut self, Place { volume, path }: Place) -> Result<PlaceSession> {
        let known = self.opened.iter().find(|(opened, _)| *opened == volume);
        let fs = if let Some((_, fs)) = known {
            fs.clone()
        } else {
            let fs = open_tree(&volume, self.tree, Opening::to(Access::Read), self.console)?;
            self.opened.push((volume.clone(), fs.clone()));
            fs
        };
        let paths = expand(&*fs, &path).map_err(|error| Failure::Inside(volume.clone(), error))?;
        let session = |path| PlaceSession { volume: volume.clone(), fs: fs.clone(), path };
        self.matches.extend(paths.into_iter().rev().map(session));
        // A pattern stands for one path at least.
        self.matches.pop().ok_or_else(|| Failure::Usage("a pattern without files".into()))
    }
}

/// What goes wrong at some of several places, while the others are gone through.
pub(crate) struct Failures<'a> {
    console: &'a Console,
    status: Option<ExitStatus>,
}

impl<'a> Failures<'a> {
    /// Nothing went wrong yet.
    pub(crate) fn new(console: &'a Console) -> Self {
        Self { console, status: None }
    }

    /// Prints a failure whose message tells where it happened.
    pub(crate) fn opening(&mut self, failure: &Failure) {
        self.note(failure.status());
        failure.print(self.console);
    }

    /// Prints what went wrong in a volume.
    pub(crate) fn inside(&mut self, volume: &Path, status: ExitStatus, text: &dyn Display) {
        self.note(status);
        self.console.failure(status, &InVolume(volume, text));
    }

    /// Remembers an error that is not printed.
    pub(crate) fn note(&mut self, status: ExitStatus) {
        // The worst one decides.
        self.status = self.status.max(Some(status));
    }

    /// What the verb ends with.
    pub(crate) fn result(&self) -> Result {
        self.status.map_or(Ok(()), |status| Err(Failure::Reported(status)))
    }
}
