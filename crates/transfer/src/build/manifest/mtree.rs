//! A manifest in the form of mtree(5), as libarchive, the mtree of FreeBSD and that of NetBSD, and
//! go-mtree write it.
//!
//! ```text
//! #mtree
//! /set type=file uid=0 gid=0 mode=0644      for all that follow, until /unset
//! .               type=dir mode=0755
//!     etc         type=dir mode=0755        a name alone: in the directory of the lines before
//!         motd    size=7 sha256digest=...
//!     ..                                    leaves the directory `etc`
//! ./usr/bin/sh    mode=0755 size=125560     a path: from the top
//! ```
//!
//! | part | what it does |
//! |---|---|
//! | [`words`] | words, and the escapes of vis(3) in them |
//! | [`keywords`] | what keywords say |
//! | [`accounts`] | the numbers of users and groups that have only names |
//!
//! What no keyword says of a file, the one at its path in the directory with the contents says:
//! type, permissions, owner, time, size, device number and target of a link. Where there is none, a
//! file belongs to root, has the permissions 0644, a directory 0755, and the time of the build.
//! Names of users and groups count where there are no numbers.
//!
//! Lines are one file if they have the same `inode` and `resdevice`, as libarchive writes them.
//! Without these, files stay one that are one in the directory with the contents. A line that names
//! other contents than those at its path is about a file of its own, unless it counts names
//! (`nlink=2`).
//!
//! Each line is a file of its own. A later one for a path counts before those before it, with
//! nothing of theirs.

mod accounts;
mod keywords;
mod words;

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::{Attr, FileId, FileType, NewNode, Timestamp};

use super::super::entry::{BuildEntry, EntryKind, EntrySink, NoContents, SourceProblem};
use super::super::tar::{archived_path, symlink_target};
use super::ManifestReading;
use super::contents::ContentsFile;
use super::lines::WORDS_MAX;
use crate::Result;
use accounts::{AccountNames, AccountType};
use keywords::Keywords;
use words::{goes_on, unescaped, words};

/// The most that the lines of `/set` may take: each file gets a copy of what they say.
const SET_BYTES_MAX: usize = 64 << 10;

/// The most directories that names may be in, one in the other. `.` is the one that it is in.
const DEPTH_MAX: usize = 4096;

const FILE_PERMISSIONS: u32 = 0o644;
const DIRECTORY_PERMISSIONS: u32 = 0o755;

/// Inodes that the manifest numbers, so that they are no others than those of the host.
const NUMBERED: u64 = 1;

/// Gives `sink` all files of the manifest.
pub(super) fn read_mtree(reading: ManifestReading<'_>, sink: &mut dyn EntrySink) -> Result {
    let mut reader = MtreeReader {
        reading,
        set: Keywords::default(),
        directory: Vec::new(),
        above: Vec::new(),
        users: None,
        groups: None,
    };
    let mut line = Vec::new();
    while reader.next_line(&mut line)? {
        reader.reading.require_not_interrupted()?;
        reader.take_line(&line, sink)?;
    }
    Ok(())
}

/// A line of one file.
struct MtreeLine {
    path: Vec<u8>,
    /// A name alone, which is in the directory of the lines before.
    is_name: bool,
    keywords: Keywords,
}

struct MtreeReader<'a> {
    reading: ManifestReading<'a>,
    /// What `/set` says.
    set: Keywords,
    /// The path of the directory that names are in.
    directory: Vec<u8>,
    /// The lengths of the paths of those above it.
    above: Vec<usize>,
    /// The numbers of names, once a line needs them.
    users: Option<AccountNames>,
    groups: Option<AccountNames>,
}

impl MtreeReader<'_> {
    /// Reads the next line, with those that it goes on in.
    fn next_line(&mut self, line: &mut Vec<u8>) -> Result<bool> {
        let lines = &mut self.reading.lines;
        let mut read = lines.next_line(line);
        while let Ok(true) = read
            && goes_on(line)
        {
            if let Some(last) = line.last_mut() {
                *last = b' ';
            }
            read = match lines.read_on(line) {
                Ok(false) => break,
                read => read,
            };
        }
        read.map(|is_there| is_there || !line.is_empty())
            .map_err(|problem| self.reading.at_line(problem))
    }

    fn take_line(&mut self, line: &[u8], sink: &mut dyn EntrySink) -> Result {
        let mut words_of = words(line);
        let taken = match words_of.next() {
            None => return Ok(()),
            Some(b"/set") => self.take_set(line.len(), words_of),
            Some(b"/unset") => {
                let mut set = std::mem::take(&mut self.set);
                let unset = words_of.try_for_each(|word| set.unset(word));
                self.set = set;
                unset
            }
            Some(b"..") => self.leave(),
            Some(first) if first.starts_with(b"/") => {
                let what = format!("{} is no command of a manifest", Escaped(first));
                Err(SourceProblem::Refused(what))
            }
            Some(first) => match self.file_line(first, words_of) {
                Ok(line) => return self.take_file(line, sink),
                Err(problem) => Err(problem),
            },
        };
        taken.map_err(|problem| self.reading.at_line(problem))
    }

    fn take_set<'w>(
        &mut self,
        line_bytes: usize,
        mut words: impl Iterator<Item = &'w [u8]>,
    ) -> Result<(), SourceProblem> {
        if line_bytes > SET_BYTES_MAX {
            let what = format!("a /set of more than {} KiB", SET_BYTES_MAX >> 10);
            return Err(SourceProblem::Refused(what));
        }
        let mut set = std::mem::take(&mut self.set);
        let taken = words.try_for_each(|word| set.take(word));
        let xattrs: usize = set.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        if xattrs > SET_BYTES_MAX {
            let what = format!("/set gives attributes of more than {} KiB", SET_BYTES_MAX >> 10);
            return Err(SourceProblem::Refused(what));
        }
        self.set = set;
        taken
    }

    /// Goes to the directory above.
    fn leave(&mut self) -> Result<(), SourceProblem> {
        let what = || "one `..` more than there are directories before it".to_owned();
        let len = self.above.pop().ok_or_else(|| SourceProblem::Refused(what()))?;
        self.directory.truncate(len);
        Ok(())
    }

    /// Goes into the directory `path`.
    fn enter(&mut self, path: &[u8]) -> Result<(), SourceProblem> {
        if self.above.len() == DEPTH_MAX {
            let what = format!("more than {DEPTH_MAX} directories without their `..`");
            return Err(SourceProblem::Refused(what));
        }
        self.above.push(self.directory.len());
        self.directory = path.to_vec();
        Ok(())
    }

    /// What the words of a line say. `mtree -D` of NetBSD writes the path last.
    fn file_line<'w>(
        &self,
        first: &'w [u8],
        rest: impl DoubleEndedIterator<Item = &'w [u8]>,
    ) -> Result<MtreeLine, SourceProblem> {
        let mut rest: Vec<&[u8]> = rest.take(WORDS_MAX + 1).collect();
        if rest.len() > WORDS_MAX {
            return Err(SourceProblem::Refused(format!("a line of more than {WORDS_MAX} words")));
        }
        let mut word = first;
        if is_keyword(first)
            && let Some(last) = rest.pop_if(|last| !is_keyword(last) && is_path(last))
        {
            rest.insert(0, first);
            word = last;
        }
        let wrong = || SourceProblem::Refused(format!("{} is no name", Escaped(word)));
        let name = unescaped(word).ok_or_else(wrong)?;
        let is_name = !name.contains(&b'/');
        let path = if is_name { [&self.directory, &b"/"[..], &name].concat() } else { name };
        let mut keywords = self.set.clone();
        rest.into_iter().try_for_each(|word| keywords.take(word))?;
        Ok(MtreeLine { path: archived_path(&path)?, is_name, keywords })
    }

    fn take_file(&mut self, line: MtreeLine, sink: &mut dyn EntrySink) -> Result {
        let MtreeLine { path, is_name, keywords } = line;
        let found = self.contents_of(&path, &keywords)?;
        if found.is_none() && keywords.is_optional && self.reading.contents.is_some() {
            return Ok(());
        }
        let keywords = filled(keywords, found.as_ref().map(|found| &found.attr));
        let entry = self.entry(path, &keywords, found.as_ref())?;
        if is_name && matches!(entry.kind, EntryKind::Directory) {
            self.enter(&entry.path).map_err(|problem| self.reading.at_line(problem))?;
        }
        if self.reading.options.leaves_out_way(&entry.path) {
            return Ok(());
        }
        let EntryKind::Regular { .. } = entry.kind else {
            return sink.put(entry, &mut NoContents);
        };
        self.put_regular(entry, &keywords, found.is_some(), sink)
    }

    /// The file in the directory with the contents that a line is about.
    fn contents_of(&self, path: &[u8], keywords: &Keywords) -> Result<Option<ContentsFile>> {
        let Some(contents) = self.reading.contents else { return Ok(None) };
        match &keywords.contents {
            Some(other) => contents.find(other, true),
            None => contents.find(path, false),
        }
    }

    /// The file that a line describes.
    fn entry(
        &mut self,
        path: Vec<u8>,
        keywords: &Keywords,
        found: Option<&ContentsFile>,
    ) -> Result<BuildEntry> {
        let at_file = |reading: &ManifestReading<'_>, problem: SourceProblem| {
            let problem = SourceProblem::Refused(format!("{}: {problem}", Escaped(&path)));
            reading.at_line(problem)
        };
        let kind = kind(keywords, found).map_err(|problem| at_file(&self.reading, problem))?;
        let (user, group) = (keywords.user.as_deref(), keywords.group.as_deref());
        let uid = match (keywords.uid, user) {
            (Some(uid), _) => Ok(uid),
            (None, Some(name)) => self.number(AccountType::User, name)?,
            (None, None) => Ok(0),
        };
        let gid = match (keywords.gid, group) {
            (Some(gid), _) => Ok(gid),
            (None, Some(name)) => self.number(AccountType::Group, name)?,
            (None, None) => Ok(0),
        };
        let permissions = match kind {
            EntryKind::Directory => DIRECTORY_PERMISSIONS,
            _ => FILE_PERMISSIONS,
        };
        Ok(BuildEntry {
            permissions: keywords.permissions.unwrap_or(permissions),
            uid: uid.map_err(|problem| at_file(&self.reading, problem))?,
            gid: gid.map_err(|problem| at_file(&self.reading, problem))?,
            mtime: keywords.mtime.unwrap_or(self.reading.options.at),
            atime: None,
            xattrs: keywords.xattrs.clone().into_iter().collect(),
            flags: keywords.flags,
            has_other_flags: keywords.other_flag,
            inode: inode(keywords, &kind, found),
            kind,
            path,
        })
    }

    /// The number of a user or a group that has only a name.
    fn number(
        &mut self,
        account_type: AccountType,
        name: &[u8],
    ) -> Result<Result<u32, SourceProblem>> {
        // All files get another owner.
        if self.reading.options.owner.is_some() {
            return Ok(Ok(0));
        }
        let names = match account_type {
            AccountType::User => &mut self.users,
            AccountType::Group => &mut self.groups,
        };
        let names = match names {
            Some(names) => names,
            none => none.insert(AccountNames::read(account_type, self.reading.contents)?),
        };
        Ok(names.number(name))
    }

    /// Gives the sink a regular file.
    fn put_regular(
        &mut self,
        entry: BuildEntry,
        keywords: &Keywords,
        is_found: bool,
        sink: &mut dyn EntrySink,
    ) -> Result {
        let size = keywords.size.unwrap_or(0);
        let digests: Vec<_> = keywords.digests.values().cloned().collect();
        let digests = if keywords.is_unchecked { &[][..] } else { &digests[..] };
        if size == 0 && !is_found {
            return self.reading.put_verified(entry, &mut NoContents, digests, 0, sink);
        }
        let place = keywords.contents.clone().unwrap_or_else(|| entry.path.clone());
        self.reading.put_contents(entry, &place, digests, size, sink)
    }
}

/// What a line describes.
fn kind(keywords: &Keywords, found: Option<&ContentsFile>) -> Result<EntryKind, SourceProblem> {
    let lacks = |what: &str| SourceProblem::Refused(what.to_owned());
    let file_type = keywords.file_type.ok_or_else(|| lacks("a file without a type="))?;
    let found = found.filter(|found| found.attr.file_type == file_type);
    Ok(match file_type {
        FileType::Regular => EntryKind::Regular { size: keywords.size.unwrap_or(0) },
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => {
            let target = match (&keywords.link, found) {
                (Some(target), _) => target.clone(),
                (None, Some(found)) => {
                    found.read_link().map_err(|error| SourceProblem::Failed(error.to_string()))?
                }
                (None, None) => return Err(lacks("a symbolic link without a link=")),
            };
            EntryKind::Symlink(symlink_target(target)?)
        }
        FileType::CharDevice | FileType::BlockDevice => {
            let rdev = keywords.device.or(found.map(|found| found.attr.rdev));
            let rdev = rdev.ok_or_else(|| lacks("a device without a device="))?;
            EntryKind::Node(NewNode { file_type, rdev })
        }
        FileType::Fifo | FileType::Socket => EntryKind::Node(NewNode { file_type, rdev: (0, 0) }),
    })
}

/// Whether the word says what a keyword is.
fn is_keyword(word: &[u8]) -> bool {
    matches!(word, b"optional" | b"nochange" | b"ignore")
        || word.contains(&b'=') && Keywords::default().take(word).is_ok()
}

/// Whether the word can only be a path from the top.
fn is_path(word: &[u8]) -> bool {
    word == b"." || word.contains(&b'/')
}

/// What a line says, with what the file in the directory with the contents says where it is silent,
/// or says that nothing is to be compared.
fn filled(mut keywords: Keywords, found: Option<&Attr>) -> Keywords {
    let Some(attr) = found else { return keywords };
    let file_type = *keywords.file_type.get_or_insert(attr.file_type);
    if attr.file_type != file_type {
        return keywords;
    }
    if keywords.is_unchecked {
        let Keywords { permissions, uid, gid, mtime, size, .. } = &mut keywords;
        (*permissions, *uid, *gid, *mtime, *size) = (None, None, None, None, None);
        (keywords.user, keywords.group) = (None, None);
    }
    keywords.permissions.get_or_insert(attr.permissions);
    keywords.mtime.get_or_insert(attr.mtime);
    keywords.size.get_or_insert(attr.size);
    if keywords.user.is_none() {
        keywords.uid.get_or_insert(attr.uid);
    }
    if keywords.group.is_none() {
        keywords.gid.get_or_insert(attr.gid);
    }
    keywords
}

/// The inode that a file is a name of, if it has several names.
fn inode(keywords: &Keywords, kind: &EntryKind, found: Option<&ContentsFile>) -> Option<Attr> {
    let file_type = keywords.file_type?;
    let has_names = keywords.nlink.is_none_or(|nlink| nlink > 1);
    if matches!(kind, EntryKind::Directory) || !has_names {
        return None;
    }
    let found = found.filter(|found| found.attr.file_type == file_type);
    let (file, generation) = match (keywords.inode, found) {
        (Some(ino), _) => {
            let (major, minor) = keywords.resident.unwrap_or((0, 0));
            (FileId { dev: u64::from(major) << 32 | u64::from(minor), ino }, NUMBERED)
        }
        (None, Some(found)) => {
            let is_own = keywords.contents.is_none() && found.attr.nlink > 1;
            if keywords.nlink.is_none() && !is_own {
                return None;
            }
            (found.attr.file, 0)
        }
        (None, None) => return None,
    };
    let none = Timestamp { secs: 0, nanos: 0 };
    Some(Attr {
        file,
        file_type,
        permissions: 0,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: (0, 0),
        size: 0,
        allocated_bytes: 0,
        atime: none,
        mtime: none,
        ctime: none,
        btime: none,
        generation,
    })
}
