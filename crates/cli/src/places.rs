//! Several places on one command line.
//!
//! A place that fails does not keep the others back: it is reported when its turn comes, and
//! the worst of what happened decides the exit code. Where the places are in several
//! volumes, messages begin with the volume, because a path alone would not tell them apart.

use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_btrfs::Filesystem;

use crate::args::{PlacesArguments, TreeArguments};
use crate::exit::{ExitStatus, Failure, Result};
use crate::output::{Console, Escaped};
use crate::place::Place;
use crate::session::{Access, Opening, PlaceSession, open_tree};

/// The places of a verb that takes several. Each volume is opened once.
pub(crate) struct Places<'a> {
    /// Those that are still to come, the next one last.
    todo: Vec<Place>,
    tree: &'a TreeArguments,
    console: &'a Arc<Console>,
    opened: Vec<(PathBuf, Filesystem)>,
}

impl<'a> Places<'a> {
    /// The places in `arguments`, none of them opened yet.
    pub(crate) fn new(arguments: &'a PlacesArguments, console: &'a Arc<Console>) -> Self {
        let mut todo: Vec<Place> =
            arguments.places.iter().map(|text| arguments.tree.open.place(text)).collect();
        todo.reverse();
        Self { todo, tree: &arguments.tree, console, opened: Vec::new() }
    }

    /// Whether paths alone do not tell the places apart.
    pub(crate) fn are_in_several_volumes(&self) -> bool {
        self.todo.windows(2).any(|pair| pair[0].volume != pair[1].volume)
    }

    /// Opens the next place.
    pub(crate) fn next(&mut self) -> Option<Result<PlaceSession>> {
        self.todo.pop().map(|place| self.open(place))
    }

    fn open(&mut self, Place { volume, path }: Place) -> Result<PlaceSession> {
        if let Some((_, fs)) = self.opened.iter().find(|(opened, _)| *opened == volume) {
            return Ok(PlaceSession { volume, fs: fs.clone(), path });
        }
        let fs = open_tree(&volume, self.tree, Opening::to(Access::Read), self.console)?;
        self.opened.push((volume.clone(), fs.clone()));
        Ok(PlaceSession { volume, fs, path })
    }
}

/// What goes wrong at some of several places, while the others are gone through.
pub(crate) struct Failures<'a> {
    console: &'a Console,
    names_volume: bool,
    status: Option<ExitStatus>,
}

impl<'a> Failures<'a> {
    /// Nothing went wrong yet.
    pub(crate) fn new(places: &Places<'a>) -> Self {
        Self::naming(places.are_in_several_volumes(), places.console)
    }

    /// The same, for messages that begin with the volume or do not.
    pub(crate) fn naming(names_volume: bool, console: &'a Console) -> Self {
        Self { console, names_volume, status: None }
    }

    /// Whether messages begin with the volume.
    pub(crate) fn names_volume(&self) -> bool {
        self.names_volume
    }

    /// Prints why a volume could not be opened, which its message names.
    pub(crate) fn opening(&mut self, failure: &Failure) {
        self.note(failure.status());
        failure.print(self.console);
    }

    /// Prints what went wrong in a volume.
    pub(crate) fn inside(&mut self, volume: &Path, status: ExitStatus, text: &dyn Display) {
        self.note(status);
        if self.names_volume {
            let volume = Escaped(volume.as_os_str().as_bytes());
            self.console.error(&format_args!("{volume}: {text}"));
        } else {
            self.console.error(text);
        }
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
