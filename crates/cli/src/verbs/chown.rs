//! `offshoot chown`: change owners.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_vfs::path::LastLink;
use offshoot_vfs::{Attr, Errno, Error, FileSystemMut, FileType, SetAttr};

use super::below::each;
use crate::args::ChownArguments;
use crate::edit::{at_every_place, moment};
use crate::exit::Result;
use crate::output::{Console, Escaped, OwnerNames};
use crate::place::VolumePath;

pub(super) fn run(arguments: &ChownArguments, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let places = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    let is_kept = arguments.no_dereference || arguments.recursive;
    let last = if is_kept { LastLink::Keep } else { LastLink::Follow };
    at_every_place(places, &arguments.edit, console, |fs, path, report| {
        let (uid, gid) = owner(arguments.owner.as_bytes(), &OwnerNames::of(fs))?;
        each(fs, path, last, arguments.recursive, report, &mut |attr, _, _| {
            let permissions = without_set_id(attr);
            fs.set_attr(attr.file, &SetAttr { permissions, uid, gid, ..SetAttr::default() }, at)
        })
    })
}

/// The permissions without set-id bits, because a program must not keep the rights of its old
/// owner. The kernel does the same. `None` if there is nothing to clear.
fn without_set_id(attr: &Attr) -> Option<u32> {
    if matches!(attr.file_type, FileType::Directory | FileType::Symlink) {
        return None;
    }
    // A set-group-id bit without the group's execute bit gives no rights, so it stays.
    let group = if attr.permissions & 0o010 != 0 { 0o2000 } else { 0 };
    let kept = attr.permissions & !(0o4000 | group);
    (kept != attr.permissions).then_some(kept)
}

/// Parses `USER`, `USER:GROUP`, `USER:` or `:GROUP` into user and group.
fn owner(text: &[u8], owners: &OwnerNames) -> Result<(Option<u32>, Option<u32>), Error> {
    let unknown = |what: &str, name: &[u8]| {
        let name = Escaped(name);
        let why = format!("no {what} is called {name} in /etc of the volume: write a number");
        Error::posix(Errno::INVAL, why)
    };
    let colon = text.iter().position(|&byte| byte == b':');
    let (user, group) = match colon {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    };
    let uid = match user {
        b"" => None,
        name => Some(owners.uid(name).ok_or_else(|| unknown("user", name))?),
    };
    let gid = match group {
        None => None,
        Some(b"") => {
            let main = uid.map(|uid| owners.main_group(uid).ok_or_else(|| unknown("user", user)));
            main.transpose()?
        }
        Some(name) => Some(owners.gid(name).ok_or_else(|| unknown("group", name))?),
    };
    Ok((uid, gid))
}
