//! The verbs that work on a mounted volume. None of them names files or devices of the host.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use super::{
    EditArguments, GetPropertyArguments, InForceArguments, ListPropertyArguments, LsArguments,
    OpenArguments, PlacesArguments, PropertyVerb, StatArguments, SubvolumeVerb, SyncArguments,
    TreeArguments, Verb, VolumeArguments,
};
use crate::live::ServedVolume;

/// What the program needs to know to run a verb on a mounted volume.
#[expect(clippy::struct_excessive_bools, reason = "each is a question of its own")]
pub(crate) struct OnMount<'a> {
    /// The places on the command line.
    pub(crate) places: Vec<&'a mut OsString>,
    /// Where the program puts the open volume.
    pub(crate) live: &'a mut Option<Arc<ServedVolume>>,
    /// An option that says how to open a volume, if one was given. A mounted volume is open
    /// already.
    pub(crate) opening: Option<&'static str>,
    /// Whether the verb changes the volume.
    pub(crate) changes: bool,
    /// Whether the verb needs data that programs stored through memory mappings.
    pub(crate) needs_mappings: bool,
    /// Whether the verb works on the volume as a whole, so that its places must exist.
    pub(crate) is_whole: bool,
    /// Whether a regular file is a place too, unless it is an image.
    pub(crate) takes_files: bool,
}

impl Verb {
    /// The places of a verb that works on mounted volumes; `None` for all other verbs.
    pub(crate) fn on_mount(&mut self) -> Option<OnMount<'_>> {
        Some(match self {
            Self::Stats(arguments) => of_volume(&mut arguments.info.volume),
            Self::Info(arguments) => of_volume(&mut arguments.volume),
            Self::Ls(LsArguments { places, .. }) | Self::Stat(StatArguments { places, .. }) => {
                let PlacesArguments { places, tree } = places;
                let of_tree = of_tree(places.iter_mut().collect(), tree);
                OnMount { takes_files: true, ..of_tree }
            }
            Self::Property(verb) => OnMount { takes_files: true, ..of_property(verb) },
            Self::Trim(arguments) => OnMount { changes: true, ..of_volume(&mut arguments.volume) },
            Self::Resize(arguments) => {
                OnMount { changes: true, ..of_volume(&mut arguments.info.volume) }
            }
            Self::Check(arguments) => of_volume(&mut arguments.info.volume),
            Self::Scrub(arguments) => {
                OnMount { changes: !arguments.read_only, ..of_volume(&mut arguments.volume) }
            }
            Self::Sync(SyncArguments { directory, live, .. }) => {
                OnMount { needs_mappings: true, ..of_mount(directory, live) }
            }
            Self::InForce(InForceArguments { directory, live, .. }) => of_mount(directory, live),
            Self::Subvolume(verb) => of_subvolume(verb),
            _ => return None,
        })
    }
}

fn of_mount<'a>(
    directory: &'a mut PathBuf,
    live: &'a mut Option<Arc<ServedVolume>>,
) -> OnMount<'a> {
    OnMount {
        places: vec![directory.as_mut_os_string()],
        live,
        opening: None,
        changes: false,
        needs_mappings: false,
        is_whole: true,
        takes_files: false,
    }
}

fn of_property(verb: &mut PropertyVerb) -> OnMount<'_> {
    match verb {
        PropertyVerb::Get(GetPropertyArguments { place, .. })
        | PropertyVerb::List(ListPropertyArguments { place }) => {
            of_tree(vec![&mut place.place], &mut place.tree)
        }
        PropertyVerb::Set(arguments) => of_edit(vec![&mut arguments.place], &mut arguments.edit),
    }
}

fn of_subvolume(verb: &mut SubvolumeVerb) -> OnMount<'_> {
    match verb {
        SubvolumeVerb::List(arguments) => of_volume(&mut arguments.info.volume),
        SubvolumeVerb::GetDefault(arguments) => of_volume(&mut arguments.volume),
        SubvolumeVerb::Show(arguments) | SubvolumeVerb::Get(arguments) => {
            of_tree(vec![&mut arguments.place.place], &mut arguments.place.tree)
        }
        SubvolumeVerb::Create(arguments) | SubvolumeVerb::Delete(arguments) => {
            of_edit(arguments.places.iter_mut().collect(), &mut arguments.edit)
        }
        SubvolumeVerb::Snapshot(arguments) => {
            let places = vec![&mut arguments.source, &mut arguments.destination];
            of_edit(places, &mut arguments.edit)
        }
        SubvolumeVerb::SetDefault(arguments) => {
            of_edit(vec![&mut arguments.place], &mut arguments.edit)
        }
        SubvolumeVerb::Set(arguments) => {
            let arguments = &mut arguments.subvolume;
            of_edit(vec![&mut arguments.place], &mut arguments.edit)
        }
    }
}

fn of_volume(arguments: &mut VolumeArguments) -> OnMount<'_> {
    let opened = opened(vec![arguments.volume.as_mut_os_string()], &mut arguments.open, None);
    OnMount { is_whole: true, ..opened }
}

fn of_tree<'a>(places: Vec<&'a mut OsString>, arguments: &'a mut TreeArguments) -> OnMount<'a> {
    let subvolume = arguments.subvolume.is_some().then_some("--subvolume");
    opened(places, &mut arguments.open, subvolume)
}

fn of_edit<'a>(places: Vec<&'a mut OsString>, arguments: &'a mut EditArguments) -> OnMount<'a> {
    let storing = arguments.storing.given();
    let mut of_tree = of_tree(places, &mut arguments.tree);
    of_tree.opening = of_tree.opening.or(storing);
    OnMount { changes: true, needs_mappings: true, ..of_tree }
}

fn opened<'a>(
    places: Vec<&'a mut OsString>,
    arguments: &'a mut OpenArguments,
    opening: Option<&'static str>,
) -> OnMount<'a> {
    let OpenArguments { devices, degraded, ignore_log, rescue, layers, live } = arguments;
    let options = [
        (!devices.is_empty(), "--device"),
        (*degraded, "--degraded"),
        (*ignore_log, "--ignore-log"),
        (!rescue.rescue.is_empty(), "--rescue"),
        (rescue.ignore_checksums, "--ignore-checksums"),
        (layers.offset.is_some(), "--offset"),
        (layers.image_format.is_some(), "--image-format"),
        (layers.backing, "--backing"),
        (layers.image_snapshot.is_some(), "--image-snapshot"),
    ];
    let given = options.iter().find(|(is_given, _)| *is_given).map(|(_, name)| *name);
    let opening = opening.or(given);
    OnMount {
        places,
        live,
        opening,
        changes: false,
        needs_mappings: false,
        is_whole: false,
        takes_files: false,
    }
}
